"""Sums over the tokens of each completion. N scored tokens of a microbatch, C its completions."""

import torch
from torch import Tensor


def sums(values_N: Tensor, completion_of_N: Tensor, count: int) -> Tensor:
    """(C,), with the gradient of `values_N`; 0 for a completion without tokens."""
    return values_N.new_zeros(count).index_add(0, completion_of_N, values_N)


def lengths(completion_of_N: Tensor, count: int) -> Tensor:
    """Scored tokens of each completion, int64 (C,)."""
    return torch.bincount(completion_of_N, minlength=count)


def means(values_N: Tensor, completion_of_N: Tensor, count: int) -> Tensor:
    """(C,); 0 for a completion without tokens."""
    return sums(values_N, completion_of_N, count) / lengths(completion_of_N, count).clamp(min=1)
