"""Sums over the tokens of each completion. Shapes: see types.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def sums(values_N: Tensor, completion_of_N: Tensor, count: int) -> Tensor:
    """Sum per completion: (C,), with the gradient of `values_N`, and 0 for a completion without tokens."""
    return values_N.new_zeros(count).index_add(0, completion_of_N, values_N)


def lengths(completion_of_N: Tensor, count: int) -> Tensor:
    """Count the scored tokens of each completion: int64 (C,)."""
    # bincount would wait for the device.
    return sums(completion_of_N.new_ones(len(completion_of_N)), completion_of_N, count)


def lasts(values_N: Tensor, completion_of_N: Tensor) -> Tensor:
    """Return the value at the last token of each completion that has tokens: (C,). `completion_of_N` is on the CPU,
    where the places are computed."""
    is_last_N = completion_of_N.diff(append=completion_of_N.new_tensor([-1])) != 0
    return values_N[is_last_N.nonzero()[:, 0].to(values_N.device, non_blocking=True)]


def means(values_N: Tensor, completion_of_N: Tensor, count: int) -> Tensor:
    """Average per completion: (C,), and 0 for a completion without tokens."""
    return sums(values_N, completion_of_N, count) / lengths(completion_of_N, count).clamp(min=1)
