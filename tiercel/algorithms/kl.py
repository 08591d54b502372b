"""Estimators of KL(policy || reference) at sampled tokens (Schulman 2020, "Approximating KL divergence")."""

from collections.abc import Callable

from torch import Tensor


def k3(logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """exp(q - p) - (q - p) - 1 with p, q the policy's and the reference's logprob: unbiased and never negative."""
    difference_N = reference_logprobs_N - logprobs_N
    return difference_N.exp() - difference_N - 1


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k3": k3}
