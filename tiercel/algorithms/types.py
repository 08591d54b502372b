"""What a loss gets and gives.

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
    longest: int  # tokens that a completion may have (rollout.max_new_tokens)
    entropy_N: Tensor | None = None  # with gradient; None where it is no term of the loss
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
