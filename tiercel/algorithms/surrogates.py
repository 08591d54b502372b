"""Surrogates: what a loss minimises at each token, given its ratio and its advantage. Shapes: see types.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from tiercel.algorithms.types import Described, TokenTerms
from tiercel.sections import PositiveFloat, Section

if TYPE_CHECKING:
    from torch import Tensor

_LOG_RATIOS = (math.log(1e-8), 20.0)  # beyond these, the weight of gamma is 0 anyway


class SurrogateKeys(Section):
    """Keys of the recipe that surrogates read; each surrogate names its own."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] | None = 0.2
    """The ratio is clipped below at 1 - clip_low; null is off."""
    clip_high: PositiveFloat | None = 0.2
    """The ratio is clipped above at 1 + clip_high; null is off."""
    delta: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = None
    """Largest ratio also where the advantage is negative (two-sided clipping); null is off."""
    gate_positive: PositiveFloat = 1.0
    """Surrogate gated (sapo): temperature of the gate where the advantage is positive."""
    gate_negative: PositiveFloat = 1.05
    """Surrogate gated (sapo): temperature of the gate where the advantage is negative."""
    gamma_power_positive: PositiveFloat = 2.0
    """Surrogate gamma (vespo): power of the ratio in its weight where the advantage is positive, k."""
    gamma_rate_positive: PositiveFloat = 3.0
    """Surrogate gamma (vespo): rate at which large ratios fade where the advantage is positive, l."""
    gamma_power_negative: PositiveFloat = 3.0
    """Surrogate gamma (vespo): k where the advantage is negative."""
    gamma_rate_negative: PositiveFloat = 2.0
    """Surrogate gamma (vespo): l where the advantage is negative."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the smallest and the largest ratio after clipping."""
        low = 0.0 if self.clip_low is None else 1 - self.clip_low
        high = math.inf if self.clip_high is None else 1 + self.clip_high
        return low, high


def clipped(ratio_N: Tensor, advantages_N: Tensor, logprobs_N: Tensor, keys: SurrogateKeys) -> TokenTerms:
    """Compute -min(ratio A, clip(ratio) A), where ratio is at most `delta`."""
    low, high = keys.bounds
    bounded_N = ratio_N if keys.delta is None else ratio_N.clamp(max=keys.delta)
    return TokenTerms(
        values_N=-(bounded_N * advantages_N).minimum(bounded_N.clamp(low, high) * advantages_N),
        token_sums=_clip_sums(
            is_low_N=(ratio_N < low) & (advantages_N < 0),
            is_high_N=((ratio_N > high) & (advantages_N > 0)) | (bounded_N < ratio_N),
        ),
    )


def weighted(ratio_N: Tensor, advantages_N: Tensor, logprobs_N: Tensor, keys: SurrogateKeys) -> TokenTerms:
    """Compute -clip(ratio) A logp, with the ratio detached: no token loses its gradient, but its weight is bounded."""
    low, high = keys.bounds
    weights_N = ratio_N.detach().clamp(low, high)
    return TokenTerms(
        values_N=-weights_N * advantages_N * logprobs_N,
        token_sums=_clip_sums(is_low_N=ratio_N < low, is_high_N=ratio_N > high),
    )


def gated(ratio_N: Tensor, advantages_N: Tensor, logprobs_N: Tensor, keys: SurrogateKeys) -> TokenTerms:
    """Compute -4 / t sigmoid(t (ratio - 1)) A. The gradient fades with the distance of the ratio from 1 instead of
    ending at a bound, and faster (t = gate_negative) if A < 0."""
    positive, negative = ratio_N.new_full((), keys.gate_positive), ratio_N.new_full((), keys.gate_negative)
    temperature_N = positive.where(advantages_N > 0, negative)
    gates_N = (temperature_N * (ratio_N - 1)).sigmoid() * 4 / temperature_N
    never_N = ratio_N.new_zeros(ratio_N.shape).bool()
    return TokenTerms(values_N=-gates_N * advantages_N, token_sums=_clip_sums(is_low_N=never_N, is_high_N=never_N))


def gamma(ratio_N: Tensor, advantages_N: Tensor, logprobs_N: Tensor, keys: SurrogateKeys) -> TokenTerms:
    """Compute -w A logp with w = r^k exp(l (1 - r)), where the ratio r is detached; w is 1 at r = 1, and 0 far from
    it."""
    log_ratio_N = ratio_N.detach().log().clamp(*_LOG_RATIOS)
    positive_N = advantages_N >= 0
    power_N = ratio_N.new_full((), keys.gamma_power_positive).where(positive_N, keys.gamma_power_negative)
    rate_N = ratio_N.new_full((), keys.gamma_rate_positive).where(positive_N, keys.gamma_rate_negative)
    weights_N = (power_N * log_ratio_N + rate_N * (1 - log_ratio_N.exp())).exp()
    never_N = ratio_N.new_zeros(ratio_N.shape).bool()
    return TokenTerms(
        values_N=-weights_N * advantages_N * logprobs_N, token_sums=_clip_sums(is_low_N=never_N, is_high_N=never_N)
    )


def _clip_sums(*, is_low_N: Tensor, is_high_N: Tensor) -> dict[str, Tensor]:
    """Count the tokens whose gradient the lower and the upper bound change."""
    return {"clip/low_fraction": is_low_N.sum(), "clip/high_fraction": is_high_N.sum()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Surrogate(Described):
    """A surrogate that a loss can use."""

    of: Callable[[Tensor, Tensor, Tensor, SurrogateKeys], TokenTerms]  # ratios, advantages, logprobs (N,), keys
    reads: tuple[str, ...]  # keys of SurrogateKeys
    learns_by_ratio: bool = True  # its gradient goes through the ratio


SURROGATES: dict[str, Surrogate] = {
    "clipped": Surrogate(
        of=clipped,
        reads=("clip_low", "clip_high", "delta"),
        formula="-min(r A, clip(r) A)",
        source="PPO: Schulman et al. 2017; `delta`: dual clip, Ye et al. 2020, and INTELLECT-2 2025",
        use="the usual one",
    ),
    "weighted": Surrogate(
        of=weighted,
        reads=("clip_low", "clip_high"),
        learns_by_ratio=False,
        formula="-clip(r) A log p, r without gradient",
        source="CISPO: MiniMax-M1 2025",
        use="several updates per rollout where rare tokens matter: no token loses its gradient",
    ),
    "gated": Surrogate(
        of=gated,
        reads=("gate_positive", "gate_negative"),
        formula="-(4 / t) sigmoid(t (r - 1)) A, t = `gate_positive` or `gate_negative` by the sign of A",
        source="SAPO: Gao et al. 2025",
        use="instead of clipping, where bounds are hard to tune",
    ),
    "gamma": Surrogate(
        of=gamma,
        reads=("gamma_power_positive", "gamma_rate_positive", "gamma_power_negative", "gamma_rate_negative"),
        learns_by_ratio=False,
        formula="-r^k exp(l (1 - r)) A log p, r without gradient; k = `gamma_power_positive` or "
        "`gamma_power_negative`, l = `gamma_rate_positive` or `gamma_rate_negative` by the sign of A",
        source="VESPO: Shen et al. 2026",
        use="completions of much older policies, whose products of ratios are far from 1",
    ),
}

if TYPE_CHECKING:
    SurrogateName = str
else:
    SurrogateName = Literal[tuple(SURROGATES)]
