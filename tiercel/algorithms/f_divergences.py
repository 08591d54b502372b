"""Divergences from the reference that a loss of pairs can bound, each given by the implicit reward of an answer.

f-DPO: Wang et al. 2023, "Beyond reverse KL". The reward for a divergence with function f is beta f'(t), t = p/r; the
constant that makes it 0 at t = 1 cancels in every margin. u = log t.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tiercel.algorithms.types import Described, described

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


F_DIVERGENCES: dict[str, FDivergence] = described(
    "f-divergence",
    {
        "reverse_kl": FDivergence(reward=reverse_kl),
        "forward_kl": FDivergence(reward=forward_kl),
        "js": FDivergence(reward=jensen_shannon),
        "alpha": FDivergence(reward=power),
    },
)

if TYPE_CHECKING:
    FDivergenceName = str
else:
    FDivergenceName = Literal[tuple(F_DIVERGENCES)]
