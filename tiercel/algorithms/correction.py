"""Importance weights for completions that another policy drew than the one that learns from them: an engine that
rounds otherwise, or an older version. Weights have no gradient and multiply the policy-gradient term.

N scored tokens of a microbatch. Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
training" (token, truncated); Liu et al. 2025, "When speed kills stability" (sequence, masked).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """A factor for each token, and which of them the cap touched."""

    values_N: Tensor  # fp32
    is_capped_N: Tensor  # bool


def by_token(log_ratios_N: Tensor, completion_of_N: Tensor) -> Tensor:
    """Each token's own ratio: biased, of low variance."""
    return log_ratios_N


def by_sequence(log_ratios_N: Tensor, completion_of_N: Tensor) -> Tensor:
    """The ratio of the whole completion, at each of its tokens: unbiased before the cap."""
    count = int(completion_of_N.max()) + 1 if len(completion_of_N) else 0
    sums_C = log_ratios_N.new_zeros(count).index_add(0, completion_of_N, log_ratios_N)
    return sums_C[completion_of_N]


def truncate(log_ratios_N: Tensor, cap: float) -> Weights:
    """min(ratio, cap)."""
    return Weights(values_N=log_ratios_N.exp().clamp(max=cap), is_capped_N=log_ratios_N.exp() > cap)


def mask(log_ratios_N: Tensor, cap: float) -> Weights:
    """The ratio, or 0 where it is above cap or below 1 / cap."""
    ratios_N = log_ratios_N.exp()
    is_outside_N = (ratios_N > cap) | (ratios_N < 1 / cap)
    return Weights(values_N=torch.where(is_outside_N, 0.0, ratios_N), is_capped_N=is_outside_N)


def importance_weights(
    old_logprobs_N: Tensor,
    sampler_logprobs_N: Tensor,
    completion_of_N: Tensor,
    *,
    level: str,
    mode: str,
    cap: float,
) -> Weights:
    """exp(old - sampler) by token or sequence, bounded. A token whose sampler logprob is NaN (not known) counts as
    drawn by the policy itself."""
    log_ratios_N = (old_logprobs_N - sampler_logprobs_N).detach().float().nan_to_num(0.0, posinf=torch.inf)
    return BOUNDS[mode](LEVELS[level](log_ratios_N, completion_of_N), cap)


LEVELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"token": by_token, "sequence": by_sequence}
BOUNDS: dict[str, Callable[[Tensor, float], Weights]] = {"truncate": truncate, "mask": mask}
