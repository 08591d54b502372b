"""What a loss minimises at each token, from its ratio and its advantage. N scored tokens of a microbatch."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.config.schema import Algorithm


@dataclass(frozen=True, kw_only=True, slots=True)
class Surrogate:
    """Per token: the term, with gradient, and where the lower and the upper bound take it away."""

    terms_N: Tensor
    is_low_N: Tensor  # bool
    is_high_N: Tensor  # bool


def _bounds(algorithm: Algorithm) -> tuple[float, float]:
    """Smallest and largest ratio."""
    low = 0.0 if algorithm.clip_low is None else 1 - algorithm.clip_low
    high = torch.inf if algorithm.clip_high is None else 1 + algorithm.clip_high
    return low, high


def clipped(ratio_N: Tensor, advantages_N: Tensor, logprobs_N: Tensor, algorithm: Algorithm) -> Surrogate:
    """-min(ratio A, clip(ratio) A), the first ratio at most `delta` (PPO 2017; the bound delta: Ye et al. 2020,
    "dual clip", and INTELLECT-2, 2025)."""
    low, high = _bounds(algorithm)
    bounded_N = ratio_N if algorithm.delta is None else ratio_N.clamp(max=algorithm.delta)
    return Surrogate(
        terms_N=-torch.minimum(bounded_N * advantages_N, bounded_N.clamp(low, high) * advantages_N),
        is_low_N=(ratio_N < low) & (advantages_N < 0),
        is_high_N=((ratio_N > high) & (advantages_N > 0)) | (bounded_N < ratio_N),
    )


def weighted(ratio_N: Tensor, advantages_N: Tensor, logprobs_N: Tensor, algorithm: Algorithm) -> Surrogate:
    """-clip(ratio) A logp, the ratio without gradient: no token loses its gradient, its weight is bounded
    (CISPO: MiniMax-M1 2025)."""
    low, high = _bounds(algorithm)
    weights_N = ratio_N.detach().clamp(low, high)
    return Surrogate(terms_N=-weights_N * advantages_N * logprobs_N, is_low_N=ratio_N < low, is_high_N=ratio_N > high)


def gated(ratio_N: Tensor, advantages_N: Tensor, logprobs_N: Tensor, algorithm: Algorithm) -> Surrogate:
    """-4 / t sigmoid(t (ratio - 1)) A: the gradient fades with the distance of the ratio from 1 instead of ending at
    a bound, faster (t = gate_negative) where A < 0 (SAPO 2025)."""
    positive, negative = ratio_N.new_tensor(algorithm.gate_positive), ratio_N.new_tensor(algorithm.gate_negative)
    temperature_N = torch.where(advantages_N > 0, positive, negative)
    gates_N = torch.sigmoid(temperature_N * (ratio_N - 1)) * 4 / temperature_N
    never_N = torch.zeros_like(ratio_N, dtype=torch.bool)
    return Surrogate(terms_N=-gates_N * advantages_N, is_low_N=never_N, is_high_N=never_N)


SurrogateOf = Callable[[Tensor, Tensor, Tensor, Algorithm], Surrogate]
