"""Estimators of KL(policy || reference) at sampled tokens (Schulman 2020, "Approximating KL divergence"), and the
penalty that a recipe builds from one. Shapes: see types.py.

The penalty is added to the loss in policy_loss.py, and to the reward in training/grpo/advantages.py.

p and q are the policy's and the reference's logprob of a token that the policy sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tiercel.algorithms.types import Described
from tiercel.config_base import NonNegativeFloat, PositiveInt, Section

if TYPE_CHECKING:
    from torch import Tensor


def k1(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """Compute p - q: unbiased, of either sign. Its own gradient is 0 in expectation, so it belongs in the reward (Tang
    and Munos 2025, "On a few pitfalls in KL divergence gradient estimation for RL")."""
    return logprobs_N - reference_logprobs_N


def k2(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """Compute (p - q)^2 / 2: biased in value, but its expected gradient is the gradient of the divergence."""
    return 0.5 * (logprobs_N - reference_logprobs_N).square()


def k3(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """Compute exp(q - p) - (q - p) - 1: unbiased and never negative."""
    difference_N = reference_logprobs_N - logprobs_N
    return difference_N.exp() - difference_N - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class KlEstimator(Described):
    """An estimator of the divergence."""

    estimate: Callable[[Tensor, Tensor], Tensor]


SCHULMAN = "Schulman 2020"
KL_ESTIMATORS: dict[str, KlEstimator] = {
    "k1": KlEstimator(
        estimate=k1,
        formula="p - q",
        source=SCHULMAN,
        use="in the reward (`kl.place: reward`), as in REINFORCE++ and RLOO; refused in the loss, where its gradient "
        "averages to 0",
    ),
    "k2": KlEstimator(
        estimate=k2,
        formula="(p - q)² / 2",
        source=SCHULMAN,
        use="in the loss, if the gradient of the divergence itself is wanted",
    ),
    "k3": KlEstimator(
        estimate=k3,
        formula="exp(q - p) - (q - p) - 1",
        source=f"{SCHULMAN}; DeepSeekMath 2024",
        use="the default: never negative and of low variance",
    ),
}

if TYPE_CHECKING:
    EstimatorName = str
else:
    EstimatorName = Literal[tuple(KL_ESTIMATORS)]


class Kl(Section):
    """Penalty for leaving the reference: the policy that the run started from."""

    coef: NonNegativeFloat = 0.0
    """Weight of the penalty; 0 computes no reference at all."""
    estimator: EstimatorName = "k3"
    """Estimator of the divergence, per token (docs/algorithms.md)."""
    place: Literal["loss", "reward"] = "loss"
    """loss: a term of the loss, averaged over tokens as the loss is; reward: the sum over a completion's tokens is
    subtracted from its reward, before the advantage."""
    by_ratio: bool = False
    """Multiply the estimate by the token's ratio, so that the gradient of k3 in the loss is that of the divergence,
    after several updates too (DeepSeek-V3.2 2025; TRL's default)."""
    sync_every: PositiveInt | None = None
    """Steps after which the reference moves towards the policy; null keeps it where the run started."""
    sync_mix: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the policy's adapter in the new reference, matrix by matrix; 1 is a copy."""

    @property
    def in_loss(self) -> bool:
        """Return whether the penalty is added to the loss, at each token."""
        return self.place == "loss"

    @property
    def in_reward(self) -> bool:
        """Return whether the penalty is subtracted from the rewards, before the advantages."""
        return self.place == "reward"

    def moves_reference_after(self, step: int) -> bool:
        """Return whether the reference follows the policy after `step` updates."""
        return self.sync_every is not None and step % self.sync_every == 0

    def estimate(self, logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
        """Estimate the divergence at each token: (N,), with the gradient of `logprobs_N`, not yet multiplied by
        coef."""
        return KL_ESTIMATORS[self.estimator].estimate(logprobs_N, reference_logprobs_N)

    def term(self, logprobs_N: Tensor, reference_logprobs_N: Tensor, old_logprobs_N: Tensor) -> Tensor:
        """Estimate the divergence as a term of the loss, multiplied by the token's ratio, with its gradient, if
        `by_ratio` is set."""
        estimate_N = self.estimate(logprobs_N, reference_logprobs_N)
        return (logprobs_N - old_logprobs_N).exp() * estimate_N if self.by_ratio else estimate_N


def penalty_of(kl: Kl) -> Kl | None:
    """Return the penalty that a recipe's `algorithm.kl` asks for, or None if its coef is 0."""
    return kl if kl.coef else None
