"""Types of losses and advantages: their inputs and results.

Shapes in this package: N scored tokens of a microbatch; C completions (of a microbatch in a loss, of a whole step in an
advantage); G completions of one prompt; F rewards of the recipe. Nothing here imports torch, so that a recipe can be
checked without it; tensors bring their own methods.
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
    """What a loss needs from a microbatch. Completions are whole: none has tokens in another microbatch."""

    logprobs_N: Tensor  # of the policy, with gradient
    old_logprobs_N: Tensor  # of the policy in the ratio's denominator, detached
    kl_N: Tensor | None  # divergence from the reference, with gradient; None if it is not a term of the loss
    advantages_C: Tensor
    completion_of_N: Tensor  # int64, the completion that each token belongs to
    totals: Totals
    longest: int  # most tokens that a completion may have (rollout.max_new_tokens; with turns, max_trajectory_tokens)
    entropy_N: Tensor | None = None  # with gradient; None if it is not a term of the loss
    teacher_N: Tensor | None = None  # a teacher's term of the loss, with gradient; None if there is none
    weights_N: Tensor | None = None  # factors of the policy-gradient term, detached; None means 1

    @property
    def advantages_N(self) -> Tensor:
        """Return the advantage of its completion for each token."""
        return self.advantages_C[self.completion_of_N]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTerms:
    """What is minimised at each token, with sums over the tokens for the metrics."""

    values_N: Tensor  # with gradient
    token_sums: Mapping[str, Tensor] = field(default_factory=dict)  # by metrics key; recorded as means


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutput:
    """The microbatch's share of the loss, with sums over its tokens for the metrics."""

    loss: Tensor
    token_sums: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardTable:
    """The rewards of a step."""

    totals_C: Tensor  # fp32, weighted sums
    group_of_C: Tensor  # int64, ascending
    rewards_CF: Tensor  # fp32, each reward on its own; NaN if it does not apply
    weights_F: Tensor  # fp32
    is_correct_C: Tensor  # bool

    def groups(self) -> list[slice]:
        """Return each group's run of completions."""
        _, sizes = self.group_of_C.unique_consecutive(return_counts=True)
        ends = sizes.cumsum(0).tolist()
        return [slice(end - size, end) for end, size in zip(ends, sizes.tolist(), strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The recipe's choices for an advantage, besides its name."""

    scale: str | None = None  # one of SCALES; None: the advantage's own
    pass_k: int | None = None
    clip: float | None = None  # largest absolute value
