"""Types of losses and advantages: what they are given and what they return.

Shapes in this package: N scored tokens of a microbatch; C completions, those of a microbatch in a loss and those of a
whole step in an advantage; G completions of one prompt; F rewards of the recipe. Nothing here imports torch, so that a
recipe is judged without it: tensors bring their own methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Described:
    """An entry of a table that a recipe chooses from, as docs/algorithms.md describes it."""

    formula: str
    source: str
    use: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Sizes of a minibatch over all ranks."""

    tokens: int
    completions: int
    groups: int

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            tokens=self.tokens + other.tokens,
            completions=self.completions + other.completions,
            groups=self.groups + other.groups,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInput:
    """What a loss needs of a microbatch. Completions are whole: none has tokens in another microbatch."""

    logprobs_N: Tensor  # of the policy, with gradient
    old_logprobs_N: Tensor  # of the policy that the ratio is taken against, detached
    kl_N: Tensor | None  # divergence from the reference, with gradient; None where it is no term of the loss
    advantages_C: Tensor
    completion_of_N: Tensor  # int64, the completion that each token belongs to
    totals: Totals
    longest: int  # tokens that a completion may have (rollout.max_new_tokens; with turns, max_trajectory_tokens)
    entropy_N: Tensor | None = None  # with gradient; None where it is no term of the loss
    teacher_N: Tensor | None = None  # a teacher's term of the loss, with gradient; None where there is none
    weights_N: Tensor | None = None  # factors of the policy-gradient term, detached; None is 1

    @property
    def advantages_N(self) -> Tensor:
        """Give each token the advantage of its completion."""
        return self.advantages_C[self.completion_of_N]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTerms:
    """What is minimised at each token, and sums over the tokens for the metrics."""

    values_N: Tensor  # with gradient
    token_sums: Mapping[str, Tensor] = field(default_factory=dict)  # by metrics key; recorded as means


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """The microbatch's share of the loss, and sums over its tokens for the metrics."""

    loss: Tensor
    token_sums: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardTable:
    """The rewards of a step."""

    totals_C: Tensor  # fp32, weighted sums
    group_of_C: Tensor  # int64, ascending
    rewards_CF: Tensor  # fp32, each reward by itself; NaN where it does not apply
    weights_F: Tensor  # fp32
    is_correct_C: Tensor  # bool

    def groups(self) -> list[slice]:
        """Give each group's run of completions."""
        _, sizes = self.group_of_C.unique_consecutive(return_counts=True)
        ends = sizes.cumsum(0).tolist()
        return [slice(end - size, end) for end, size in zip(ends, sizes.tolist(), strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Choices of the recipe beside the advantage's name."""

    scale: str | None = None  # one of SCALES; None: the advantage's own
    pass_k: int | None = None
    clip: float | None = None  # largest absolute value
