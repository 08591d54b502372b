"""Importance weights and masks for completions sampled by a policy other than the one that learns from them: an engine
that rounds differently, or an older version. Shapes: see types.py.

Yao et al. 2025, "Your efficient RL framework secretly brings you
off-policy RL training" (token, truncated); Liu et al. 2025, "When speed kills stability" (sequence, masked);
DeepSeek-V3.2, 2025 (mask of negative sequences).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tiercel.algorithms import completions
from tiercel.config_base import Section

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST_LOG_RATIO = 20.0  # bound for the metrics, which would otherwise overflow


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """A factor for each token, and whether a bound changed it."""

    values_N: Tensor  # fp32
    is_capped_N: Tensor  # bool


def by_token(log_ratios_N: Tensor, completion_of_N: Tensor, count: int) -> Tensor:
    """Return each token's own log ratio: biased, but of low variance."""
    return log_ratios_N


def by_sequence(log_ratios_N: Tensor, completion_of_N: Tensor, count: int) -> Tensor:
    """Return the log ratio of the whole completion, at each of its tokens: unbiased before the cap."""
    return completions.sums(log_ratios_N, completion_of_N, count)[completion_of_N]


def truncate(log_ratios_N: Tensor, cap: float, floor: float | None) -> Weights:
    """Compute min(ratio, cap), but at least `floor`; None means 0."""
    ratios_N, low = log_ratios_N.exp(), floor or 0.0
    return Weights(values_N=ratios_N.clamp(low, cap), is_capped_N=(ratios_N > cap) | (ratios_N < low))


def mask(log_ratios_N: Tensor, cap: float, floor: float | None) -> Weights:
    """Return the ratio, or 0 if it is above `cap` or below `floor`; a `floor` of None means 1 / cap."""
    ratios_N = log_ratios_N.exp()
    is_outside_N = (ratios_N > cap) | (ratios_N < (1 / cap if floor is None else floor))
    return Weights(values_N=ratios_N.masked_fill(is_outside_N, 0.0), is_capped_N=is_outside_N)


def log_ratios(old_logprobs_N: Tensor, sampler_logprobs_N: Tensor) -> Tensor:
    """Compute old - sampler, fp32 (N,), detached. A token whose sampler logprob is NaN (unknown) is treated as sampled
    by the policy itself."""
    return (old_logprobs_N - sampler_logprobs_N).detach().float().nan_to_num(0.0, posinf=math.inf)


def importance_weights(
    old_logprobs_N: Tensor,
    sampler_logprobs_N: Tensor,
    completion_of_N: Tensor,
    count: int,
    correction: Correction,
) -> Weights:
    """Compute exp(old - sampler) per token or per sequence, bounded. `count` is the number of completions, C; the level
    of `correction` must not be none."""
    log_ratios_N = log_ratios(old_logprobs_N, sampler_logprobs_N)
    ratios_N = LEVELS[correction.level](log_ratios_N, completion_of_N, count)
    return BOUNDS[correction.mode](ratios_N, correction.cap, correction.floor)


def is_near_policy(
    logprobs_N: Tensor, sampler_logprobs_N: Tensor, advantages_C: Tensor, completion_of_N: Tensor, delta: float
) -> Tensor:
    """Compute bool (N,), which is False at the tokens of completions with a negative advantage whose mean of (sampler -
    policy) is above `delta`. The policy hardly makes such a mistake any more, so it learns little from it
    (DeepSeek-V3.2)."""
    distance_N = -log_ratios(logprobs_N, sampler_logprobs_N)
    distance_C = completions.means(distance_N, completion_of_N, len(advantages_C))
    return ~((advantages_C < 0) & (distance_C > delta))[completion_of_N]


def drift_sums(
    old_logprobs_N: Tensor, sampler_logprobs_N: Tensor, completion_of_N: Tensor, count: int
) -> dict[str, Tensor]:
    """Compute the sums that `drift_metrics` needs; they add up over microbatches. `count` is the number of completions,
    each with at least one token. Log ratios are clamped to -20..20."""
    log_ratios_N = log_ratios(old_logprobs_N, sampler_logprobs_N)
    tokens_N = log_ratios_N.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    sequences_C = completions.sums(log_ratios_N, completion_of_N, count).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
    return {
        "drift/tokens": tokens_N.new_full((), len(tokens_N)),
        "drift/log": tokens_N.sum(),
        "drift/square": (2 * tokens_N).exp().sum(),
        "drift/completions": tokens_N.new_full((), count),
        "drift/sequence": sequences_C.exp().sum(),
        "drift/sequence_square": (2 * sequences_C).exp().sum(),
    }


def drift_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Measure how far the sampler was from the learning policy, given summed `drift_sums`; empty without tokens.

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


LEVELS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {"token": by_token, "sequence": by_sequence}
BOUNDS: dict[str, Callable[[Tensor, float, float | None], Weights]] = {"truncate": truncate, "mask": mask}


class Correction(Section):
    """Importance weights for completions that an engine, or an older version, drew with other probabilities than the
    policy that learns from them has."""

    level: Literal["none", "token", "sequence"] = "none"
    """The ratio of the learner's probability to the engine's: of each token, or of the whole completion; none is 1."""
    mode: Literal["truncate", "mask"] = "truncate"
    """truncate: a ratio above the cap becomes the cap; mask: one above the cap or below the floor becomes 0."""
    cap: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 2.0
    """Largest ratio."""
    floor: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Smallest ratio, to which truncate raises smaller ones; 0 is none. null: 1 / cap for mask, none for truncate."""
