"""Which row comes when: pure functions of (seed, epoch, index).

Every rank and loader worker computes the same order for itself, so nothing about it is ever stored: a run resumes
from one integer, next_index = step * prompts_per_step.

Rows that fill up a step (rollout.resample_tries) come from a second order of the same rows, whose indices start at
RESAMPLED; how many of a step's tries were made is part of no state either, for each has indices of its own.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

import numpy as np

Item = TypeVar("Item")
RESAMPLED = 1 << 40
_EPOCHS_APART = 1 << 32  # of the two orders, so that no epoch of one repeats one of the other


def row_of_index(index: int, row_count: int, seed: int, shuffle: bool) -> tuple[int, int]:
    """(epoch, row number) of the index-th row of the run, counted from 0 through all epochs; from RESAMPLED on, of the
    rows that fill up steps."""
    if row_count < 1:
        raise ValueError(f"row_count is {row_count}; an order needs at least one row")
    if index >= RESAMPLED:
        epoch, place = divmod(index - RESAMPLED, row_count)
        return epoch, int(_permutation(row_count, seed, epoch + _EPOCHS_APART)[place])
    epoch, place = divmod(index, row_count)
    return epoch, int(_permutation(row_count, seed, epoch)[place]) if shuffle else place


def indices_of_try(step: int, number: int, tries: int, prompts_per_step: int) -> range:
    """Global indices of the rows of a step's further rollout `number` of at most `tries`; shuffled in any case."""
    start = RESAMPLED + (step * tries + number) * prompts_per_step
    return range(start, start + prompts_per_step)


def prompts_of_epochs(epochs: float, row_count: int) -> int:
    """Rows that `epochs` passes over the data take, to the nearest row and at least 1."""
    return max(1, round(epochs * row_count))


def steps_of_epochs(epochs: float, row_count: int, prompts_per_step: int) -> int:
    """Steps that `epochs` passes over the data take; the last one may run short."""
    return math.ceil(prompts_of_epochs(epochs, row_count) / prompts_per_step)


def indices_of_step(step: int, prompts_per_step: int, end: int | None = None) -> range:
    """Global indices of a step's rows, cut at `end` (exclusive) where the last step runs short."""
    start = step * prompts_per_step
    stop = start + prompts_per_step
    return range(start, stop if end is None else max(start, min(stop, end)))


def rank_slice(indices: Sequence[Item], rank: int, world_size: int) -> Sequence[Item]:
    """A rank's share: contiguous, and as large as any other to within one. All ranks' shares in order are `indices`."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of the {world_size} ranks 0 to {world_size - 1}")
    return indices[len(indices) * rank // world_size : len(indices) * (rank + 1) // world_size]


@lru_cache(maxsize=4)
def _permutation(row_count: int, seed: int, epoch: int) -> np.ndarray:
    """Row numbers in the order of one epoch, int64 (row_count,)."""
    # NumPy promises the same raw Philox stream in every version, but not the same Generator.permutation.
    draws = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(row_count)
    order = np.argsort(draws, kind="stable")
    order.setflags(write=False)
    return order
