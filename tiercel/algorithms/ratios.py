"""Ratios of the policy's probability to the old policy's, per token or per completion. Shapes: see types.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tiercel.algorithms import completions
from tiercel.algorithms.types import Described

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_LOG_PRODUCT = 60.0  # its exponential is finite in fp32, and so is a sum of many


def by_token(log_ratios_N: Tensor, completion_of_N: Tensor, count: int) -> Tensor:
    """Return each token's own ratio."""
    return log_ratios_N.exp()


def by_sequence(log_ratios_N: Tensor, completion_of_N: Tensor, count: int) -> Tensor:
    """Return the geometric mean of a completion's token ratios, at each of its tokens."""
    return completions.means(log_ratios_N, completion_of_N, count).exp()[completion_of_N]


def by_sequence_at_token(log_ratios_N: Tensor, completion_of_N: Tensor, count: int) -> Tensor:
    """Return the value of the completion's ratio, with the gradient of the token's own."""
    fixed_N = completions.means(log_ratios_N.detach(), completion_of_N, count)[completion_of_N]
    return (fixed_N + log_ratios_N - log_ratios_N.detach()).exp()


def by_product(log_ratios_N: Tensor, completion_of_N: Tensor, count: int) -> Tensor:
    """Return the product of a completion's token ratios, at each of its tokens."""
    return _finite(completions.sums(log_ratios_N, completion_of_N, count)).exp()[completion_of_N]


def by_product_at_token(log_ratios_N: Tensor, completion_of_N: Tensor, count: int) -> Tensor:
    """Return the value of the completion's product, with the gradient of the token's own ratio."""
    fixed_N = _finite(completions.sums(log_ratios_N.detach(), completion_of_N, count))[completion_of_N]
    return (fixed_N + log_ratios_N - log_ratios_N.detach()).exp()


def _finite(log_products_C: Tensor) -> Tensor:
    """Bound the logarithms of products, whose exponential would be infinite in fp32 above 88: then a clipped token's
    gradient, 0 times infinity, would be NaN. The bound is beyond every clip."""
    return log_products_C.clamp(max=LARGEST_LOG_PRODUCT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio(Described):
    """A ratio that a loss can use."""

    of: Callable[[Tensor, Tensor, int], Tensor]  # log ratios (N,), completion_of_N, C -> ratios (N,)
    # The ratio with the same value whose gradient at a token is the token's own; None if this ratio already is one.
    by_token: str | None = None


RATIOS: dict[str, Ratio] = {
    "token": Ratio(of=by_token, formula="r of the token", source="PPO: Schulman et al. 2017", use="the usual one"),
    "sequence": Ratio(
        of=by_sequence,
        by_token="sequence_at_token",
        formula="r the geometric mean of the completion's token ratios",
        source="GSPO: Zheng et al. 2025",
        use="mixtures of experts and long completions, whose token ratios are noisy",
    ),
    "sequence_at_token": Ratio(
        of=by_sequence_at_token,
        formula="r of the completion in value, with the gradient of the token's own",
        source="GSPO-token: Zheng et al. 2025",
        use="as `sequence` if tokens of a completion weigh differently (`top_entropy`, a correction by token)",
    ),
    "product": Ratio(
        of=by_product,
        by_token="product_at_token",
        formula="r the product of the completion's token ratios",
        source="RLOO: Ahmadian et al. 2024, where a completion is one action",
        use="several updates by `advantage: rloo`; unbiased, of a variance that grows with the length",
    ),
    "product_at_token": Ratio(
        of=by_product_at_token,
        formula="r the product of the completion's token ratios in value, with the gradient of the token's own",
        source="as `product`",
        use="as `product` if tokens of a completion weigh differently (`top_entropy`, a correction by token)",
    ),
}

if TYPE_CHECKING:
    RatioName = str
else:
    RatioName = Literal[tuple(RATIOS)]
