"""Divergences from the reference that a loss of pairs can bound, each given by the implicit reward of an answer.

f-DPO: Wang et al. 2023, "Beyond reverse KL". The reward for a divergence with function f is beta f'(t), t = p/r; the
constant that makes it 0 at t = 1 cancels in every margin. u = log t.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tiercel.algorithms.types import Described

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 80.0  # an exponent whose exp fits a float32; an answer that far off has no gradient


def reverse_kl(log_ratios: Tensor, alpha: float) -> Tensor:
    """Compute log t."""
    return log_ratios


def forward_kl(log_ratios: Tensor, alpha: float) -> Tensor:
    """Compute 1 - 1 / t."""
    return power(log_ratios, 1.0)


def jensen_shannon(log_ratios: Tensor, alpha: float) -> Tensor:
    """Compute log(2 t / (1 + t))."""
    return math.log(2) - (-log_ratios).logaddexp(log_ratios.new_zeros(()))


def power(log_ratios: Tensor, alpha: float) -> Tensor:
    """Compute (1 - t^-alpha) / alpha."""
    return -(-alpha * log_ratios).clamp(max=_LARGEST).expm1() / alpha


@dataclass(frozen=True, kw_only=True, slots=True)
class FDivergence(Described):
    """A divergence from the reference."""

    reward: Callable[[Tensor, float], Tensor]  # from log ratios and dpo.divergence_alpha, not yet multiplied by beta


_SOURCE = "f-DPO: Wang et al. 2023"
F_DIVERGENCES: dict[str, FDivergence] = {
    "reverse_kl": FDivergence(
        reward=reverse_kl, formula="u", source="DPO: Rafailov et al. 2023", use="the default: DPO itself"
    ),
    "forward_kl": FDivergence(
        reward=forward_kl,
        formula="1 - exp(-u)",
        source=_SOURCE,
        use="answers stay as various as the reference's; least aligned",
    ),
    "js": FDivergence(
        reward=jensen_shannon,
        formula="log(2 / (1 + exp(-u)))",
        source=_SOURCE,
        use="between the two; a reward has an upper bound",
    ),
    "alpha": FDivergence(
        reward=power,
        formula="(1 - exp(-a u)) / a, a = dpo.divergence_alpha",
        source=_SOURCE,
        use="from reverse_kl (a near 0) to forward_kl (a near 1)",
    ),
}

if TYPE_CHECKING:
    FDivergenceName = str
else:
    FDivergenceName = Literal[tuple(F_DIVERGENCES)]
