"""Estimators of KL(policy || reference) at sampled tokens (Schulman 2020, "Approximating KL divergence").

N scored tokens. p and q are the policy's and the reference's logprob of a token that the policy drew.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


def k1(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """p - q: unbiased, of either sign. Its own gradient is 0 in expectation, so it belongs into the reward
    (Tang and Munos 2025, "On a few pitfalls in KL divergence gradient estimation for RL")."""
    return logprobs_N - reference_logprobs_N


def k2(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """(p - q)^2 / 2: biased in value; its gradient is that of the divergence, in expectation."""
    return 0.5 * (logprobs_N - reference_logprobs_N).square()


def k3(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """exp(q - p) - (q - p) - 1: unbiased and never negative."""
    difference_N = reference_logprobs_N - logprobs_N
    return difference_N.exp() - difference_N - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class KlEstimator:
    """An estimator, and what the catalogue says of it."""

    estimate: Callable[[Tensor, Tensor], Tensor]
    formula: str
    source: str
    use: str


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
        use="in the loss, where the gradient of the divergence itself is wanted",
    ),
    "k3": KlEstimator(
        estimate=k3,
        formula="exp(q - p) - (q - p) - 1",
        source=f"{SCHULMAN}; DeepSeekMath 2024",
        use="the default: never negative and of low variance",
    ),
}
