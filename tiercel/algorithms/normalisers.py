"""Factors of each token that make the sum over tokens a mean. Shapes: see types.py.

They hold totals of the whole minibatch over all ranks, so the sum of the microbatches' losses is the loss of the
minibatch, however it was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tiercel.algorithms import completions
from tiercel.algorithms.types import Described, LossInput

if TYPE_CHECKING:
    from torch import Tensor


def per_sequence(batch: LossInput) -> Tensor:
    """Give each token 1 / (tokens of its completion x completions)."""
    lengths_C = completions.lengths(batch.completion_of_N, len(batch.advantages_C)).to(batch.logprobs_N.dtype)
    return 1.0 / (lengths_C[batch.completion_of_N] * batch.totals.completions)


def per_token(batch: LossInput) -> Tensor:
    """Give each token 1 / tokens of the minibatch."""
    return _everywhere(batch, 1.0 / max(1, batch.totals.tokens))


def per_constant(batch: LossInput) -> Tensor:
    """Give each token 1 / (rollout.max_new_tokens x completions): no factor depends on a length that was drawn."""
    return _everywhere(batch, 1.0 / (batch.longest * max(1, batch.totals.completions)))


def per_completion(batch: LossInput) -> Tensor:
    """Give each token 1 / completions."""
    return _everywhere(batch, 1.0 / max(1, batch.totals.completions))


def _everywhere(batch: LossInput, factor: float) -> Tensor:
    return batch.logprobs_N.new_full(batch.logprobs_N.shape, factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Normaliser(Described):
    """A mean that a loss can take."""

    of: Callable[[LossInput], Tensor]  # -> (N,), detached


NORMALISERS: dict[str, Normaliser] = {
    "sequence": Normaliser(
        of=per_sequence,
        formula="mean over each completion's tokens, then over completions",
        source="DeepSeekMath 2024",
        use="short and long completions weigh the same",
    ),
    "token": Normaliser(
        of=per_token,
        formula="mean over all tokens of the minibatch",
        source="DAPO: Yu et al. 2025",
        use="every token weighs the same, so long completions weigh more",
    ),
    "constant": Normaliser(
        of=per_constant,
        formula="sum over tokens / (completions x `rollout.max_new_tokens`)",
        source="Dr. GRPO: Liu et al. 2025",
        use="no weight depends on a length, so long wrong completions are not favoured",
    ),
    "sum": Normaliser(
        of=per_completion,
        formula="sum over each completion's tokens, mean over completions",
        source="LUSPO: Liu et al. 2026",
        use="with `ratio: sequence`, where a completion weighs as much as it is long",
    ),
}

if TYPE_CHECKING:
    NormaliserName = str
else:
    NormaliserName = Literal[tuple(NORMALISERS)]
