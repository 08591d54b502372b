"""What to do about completions that another policy drew than the one that learns from them: an engine that rounds
otherwise, or an older version.

N scored tokens of a microbatch, C its completions. Yao et al. 2025, "Your efficient RL framework secretly brings you
off-policy RL training" (token, truncated); Liu et al. 2025, "When speed kills stability" (sequence, masked);
DeepSeek-V3.2, 2025 (mask of negative sequences).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.algorithms import completions

_LARGEST_LOG_RATIO = 20.0  # of the metrics, which would overflow


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
    return completions.sums(log_ratios_N, completion_of_N, _count(completion_of_N))[completion_of_N]


def truncate(log_ratios_N: Tensor, cap: float) -> Weights:
    """min(ratio, cap)."""
    return Weights(values_N=log_ratios_N.exp().clamp(max=cap), is_capped_N=log_ratios_N.exp() > cap)


def mask(log_ratios_N: Tensor, cap: float) -> Weights:
    """The ratio, or 0 where it is above cap or below 1 / cap."""
    ratios_N = log_ratios_N.exp()
    is_outside_N = (ratios_N > cap) | (ratios_N < 1 / cap)
    return Weights(values_N=torch.where(is_outside_N, 0.0, ratios_N), is_capped_N=is_outside_N)


def log_ratios(old_logprobs_N: Tensor, sampler_logprobs_N: Tensor) -> Tensor:
    """fp32 (N,), detached: old - sampler. A token whose sampler logprob is NaN (not known) counts as drawn by the
    policy itself."""
    return (old_logprobs_N - sampler_logprobs_N).detach().float().nan_to_num(0.0, posinf=torch.inf)


def importance_weights(
    old_logprobs_N: Tensor,
    sampler_logprobs_N: Tensor,
    completion_of_N: Tensor,
    *,
    level: str,
    mode: str,
    cap: float,
) -> Weights:
    """exp(old - sampler) by token or sequence, bounded."""
    log_ratios_N = log_ratios(old_logprobs_N, sampler_logprobs_N)
    return BOUNDS[mode](LEVELS[level](log_ratios_N, completion_of_N), cap)


def is_near_policy(
    logprobs_N: Tensor, sampler_logprobs_N: Tensor, advantages_C: Tensor, completion_of_N: Tensor, delta: float
) -> Tensor:
    """bool (N,), False at the tokens of a completion with a negative advantage whose mean of (sampler - policy) is
    above `delta`: a mistake that the policy would hardly make any more teaches it nothing (DeepSeek-V3.2).
    """
    distance_N = -log_ratios(logprobs_N, sampler_logprobs_N)
    distance_C = completions.means(distance_N, completion_of_N, len(advantages_C))
    return ~((advantages_C < 0) & (distance_C > delta))[completion_of_N]


def drift_sums(old_logprobs_N: Tensor, sampler_logprobs_N: Tensor, completion_of_N: Tensor) -> dict[str, Tensor]:
    """Sums that `drift_metrics` takes; they add up over microbatches. Log ratios are cut at 20 either way."""
    log_ratios_N = log_ratios(old_logprobs_N, sampler_logprobs_N)
    count = _count(completion_of_N)
    tokens_N = log_ratios_N.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    sequences_C = completions.sums(log_ratios_N, completion_of_N, count).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    return {
        "drift/tokens": torch.tensor(len(tokens_N)),
        "drift/log": tokens_N.sum(),
        "drift/square": (2 * tokens_N).exp().sum(),
        "drift/completions": torch.tensor(count),
        "drift/sequence": sequences_C.exp().sum(),
        "drift/sequence_square": (2 * sequences_C).exp().sum(),
    }


def drift_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """How far the sampler was from the policy that learns, from the summed `drift_sums`; empty without tokens.

    off_policy/kl      mean over tokens of log sampler - log policy: KL(sampler || policy)
    off_policy/chi2    mean over tokens of ratio^2, less 1
    off_policy/ess     effective share of the completions, (sum ratio)^2 / (completions x sum ratio^2)
    """
    tokens, count = sums.get("drift/tokens", 0.0), sums.get("drift/completions", 0.0)
    if not tokens or not count:
        return {}
    return {
        "off_policy/kl": -sums["drift/log"] / tokens,
        "off_policy/chi2": sums["drift/square"] / tokens - 1,
        "off_policy/ess": sums["drift/sequence"] ** 2 / (count * sums["drift/sequence_square"]),
    }


def _count(completion_of_N: Tensor) -> int:
    return int(completion_of_N.max()) + 1 if len(completion_of_N) else 0


LEVELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"token": by_token, "sequence": by_sequence}
BOUNDS: dict[str, Callable[[Tensor, float], Weights]] = {"truncate": truncate, "mask": mask}
