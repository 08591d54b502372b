"""Compute the order of the rows, with pure functions of (seed, epoch, index).

Every rank and every loader worker computes the same order, so the order is never stored: a run resumes from one
integer, next_index = step * prompts_per_step.

Several files are mixed by weight, in rounds. A round has as many rows as all files together and takes a fixed number of
rows, the share, from each file. These are spread over the round. Each file has its own epochs.

Rows that fill up a step (rollout.resample_tries) come from a second order of the same rows, whose indices start at
RESAMPLED. The number of tries that a step made is not stored either, because each try has its own indices.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import compress
from typing import Any, Literal, TypeVar

import numpy as np

Item = TypeVar("Item")
RESAMPLED = 1 << 40
_ROUNDS_APART = 1 << 48  # added to the number of a round, so that no round is shuffled like an epoch of rows
_CLUSTERS_APART = 1 << 49  # added to the epochs of clusters, so that they are not shuffled like their rows
_EPOCHS_APART = 1 << 32  # added to the epochs of the second order, so that none is shuffled like one of the first


@dataclass(frozen=True, eq=False, slots=True)
class Clusters:
    """Holds the number of the cluster of each row of a file. Rows of a cluster stay together when rows are shuffled."""

    of_row: np.ndarray


def clusters_of(keys: Sequence[Any] | np.ndarray, most: int | None = None) -> Clusters:
    """Put rows with equal keys into the same cluster, or into several that have at most `most` rows each. Clusters are
    numbered by their first rows."""
    of_row = _by_first(np.asarray(keys))
    if most is not None and len(of_row):
        together = np.argsort(of_row, kind="stable")
        starts = np.searchsorted(of_row[together], of_row[together])
        turns = np.empty_like(of_row)
        turns[together] = np.arange(len(of_row)) - starts
        of_row = _by_first(of_row * (1 + len(of_row)) + turns // most)
    return Clusters(of_row)


def _by_first(keys: np.ndarray) -> np.ndarray:
    """Number equal keys alike, in the order in which they come first, int64 (rows,)."""
    _, firsts, of_row = np.unique(keys, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(firsts))[of_row.reshape(-1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowOrder:
    """Holds everything that decides the order of a run's rows. The rows are numbered file after file."""

    counts: tuple[int, ...]  # usable rows of each file
    weights: tuple[float, ...]
    seed: int
    shuffle: bool
    clusters: Clusters | None = None  # for the rows of a single file

    @property
    def row_count(self) -> int:
        """Count the usable rows of all files."""
        return sum(self.counts)

    @property
    def shares(self) -> tuple[int, ...]:
        """Return how many rows of each file are in a round: in proportion to its weight, rounded by largest remainder,
        at least 1."""
        return _shares(self.row_count, self.weights)

    def row(self, index: int) -> int:
        """Return the number of the row at `index`, which counts from 0 through all epochs of the run."""
        if len(self.counts) == 1:
            return row_of_index(index, self.counts[0], self.seed, self.shuffle, self.clusters)
        start = RESAMPLED if index >= RESAMPLED else 0
        shares = self.shares
        number, place = divmod(index - start, sum(shares))
        if self.shuffle or start:
            epoch = _ROUNDS_APART + number + (_EPOCHS_APART if start else 0)
            files, turns = _shuffled_round(shares, self.seed, epoch)
        else:
            files, turns = _even_round(shares)
        file = int(files[place])
        own_index = start + number * shares[file] + int(turns[place])
        own_seed = (self.seed + file) % 2**64  # otherwise files of equal length would have equal orders
        return sum(self.counts[:file]) + row_of_index(own_index, self.counts[file], own_seed, self.shuffle)


def file_order(row_count: int) -> RowOrder:
    """Return the order in which the rows are in the file."""
    return RowOrder(counts=(row_count,), weights=(1.0,), seed=0, shuffle=False)


def row_of_index(index: int, row_count: int, seed: int, shuffle: bool, clusters: Clusters | None = None) -> int:
    """Return the number of the row at `index`, which counts from 0 through all epochs of the run; indices from
    RESAMPLED on belong to rows that fill up steps. Raises ValueError if there are no rows."""
    if row_count < 1:
        raise ValueError(f"row_count is {row_count}, but an order needs at least one row")
    if index >= RESAMPLED:
        epoch, place = divmod(index - RESAMPLED, row_count)
        return int(_permutation(row_count, seed, epoch + _EPOCHS_APART)[place])
    epoch, place = divmod(index, row_count)
    if shuffle and clusters is not None:
        return int(_clustered(clusters, seed, epoch)[place])
    return int(_permutation(row_count, seed, epoch)[place]) if shuffle else place


def indices_of_try(step: int, number: int, tries: int, prompts_per_step: int) -> range:
    """Return the global indices of the rows of try `number`, out of at most `tries`, to fill up a step. These rows are
    always shuffled."""
    start = RESAMPLED + (step * tries + number) * prompts_per_step
    return range(start, start + prompts_per_step)


def prompts_of_epochs(epochs: float, row_count: int) -> int:
    """Count the rows of `epochs` passes over the data, rounded, at least 1."""
    return max(1, round(epochs * row_count))


def steps_of_epochs(epochs: float, row_count: int, prompts_per_step: int) -> int:
    """Count the steps of `epochs` passes over the data. The last one may have fewer rows."""
    return math.ceil(prompts_of_epochs(epochs, row_count) / prompts_per_step)


def indices_of_step(step: int, prompts_per_step: int, end: int | None = None) -> range:
    """Return the global indices of a step's rows, all below `end`."""
    start = step * prompts_per_step
    stop = start + prompts_per_step
    return range(start, stop if end is None else max(start, min(stop, end)))


def rank_slice(indices: Sequence[Item], rank: int, world_size: int) -> Sequence[Item]:
    """Return a rank's share of the items, a contiguous part. Shares differ by at most one item, and joined in the order
    of the ranks they are `indices`. Raises ValueError for a rank that does not exist."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not one of the {world_size} ranks 0 to {world_size - 1}")
    return indices[len(indices) * rank // world_size : len(indices) * (rank + 1) // world_size]


@lru_cache(maxsize=16)  # holds one epoch for each of a few files
def _permutation(row_count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the row numbers in the order of one epoch, int64 (row_count,)."""
    # NumPy promises the same raw Philox stream in every version, but not the same Generator.permutation.
    draws = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(row_count)
    order = np.argsort(draws, kind="stable")
    order.setflags(write=False)
    return order


@lru_cache(maxsize=4)
def _clustered(clusters: Clusters, seed: int, epoch: int) -> np.ndarray:
    """Return the row numbers in the order of one epoch: the clusters are shuffled, and so are the rows within each."""
    places = np.argsort(_permutation(int(clusters.of_row.max()) + 1, seed, epoch + _CLUSTERS_APART))
    rows = _permutation(len(clusters.of_row), seed, epoch)
    return rows[np.argsort(places[clusters.of_row[rows]], kind="stable")]


@lru_cache(maxsize=4)
def _shares(total: int, weights: tuple[float, ...]) -> tuple[int, ...]:
    exact = [total * weight / math.fsum(weights) for weight in weights]
    shares = [max(1, math.floor(each)) for each in exact]
    by_remainder = sorted(range(len(exact)), key=lambda file: (math.floor(exact[file]) - exact[file], file))
    for file in by_remainder[: max(0, total - sum(shares))]:
        shares[file] += 1
    return tuple(shares)


@lru_cache(maxsize=4)
def _shuffled_round(shares: tuple[int, ...], seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Return for each place of a round its file, and how many rows of that file come before it in the round."""
    return _with_turns(np.repeat(np.arange(len(shares)), shares)[_permutation(sum(shares), seed, epoch)])


@lru_cache(maxsize=4)
def _even_round(shares: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the same as `_shuffled_round`, but with each file's rows evenly spread over the round."""
    places = [((row + 0.5) / share, file) for file, share in enumerate(shares) for row in range(share)]
    return _with_turns(np.array([file for _, file in sorted(places)]))


def _with_turns(files: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    turns = np.empty_like(files)
    for file in np.unique(files):
        is_of_file = files == file
        turns[is_of_file] = np.arange(is_of_file.sum())
    return files, turns


# What rows are chosen for. Choices from the same rows for two purposes are independent.
Use = Literal["part of a file", "held out"]


def chosen(files: np.ndarray, lines: np.ndarray, ids: Iterable[str], count: int, use: Use) -> np.ndarray:
    """Return the positions of `count` of the rows, in ascending order. `files` has for each row its file's place in
    the sorted names. Rows of several files with the same id, and rows of one record (such as several expressions of one
    box), are chosen together, unless the count is reached between them."""
    files, lines = np.asarray(files, np.uint64), np.asarray(lines, np.uint64)
    keys = files << np.uint64(48) | lines
    ordered = np.sort(keys)
    if np.all(ordered[1:] > ordered[:-1]):  # as a rule, each record has one row; the rest needs more memory
        halves = _halves(ids, use)
    else:
        _, firsts, records = np.unique(keys, return_index=True, return_inverse=True)
        is_first = np.zeros(len(keys), dtype=bool)
        is_first[firsts] = True
        halves = _halves(compress(ids, is_first), use)
        halves = halves[(np.cumsum(is_first) - 1)[firsts]][records.reshape(-1)]
    near = np.arange(len(keys))
    if 0 < count < len(keys):  # only these can be among the first
        near = np.flatnonzero(halves[:, 0] <= np.partition(halves[:, 0], count - 1)[count - 1])
    first = np.lexsort((lines[near], files[near], halves[near, 1], halves[near, 0]))[:count]
    return np.sort(near[first])


def _halves(ids: Iterable[str], use: Use) -> np.ndarray:
    """Return the halves of the hash of each id, uint64 (ids, 2). Those of equal ids alone are equal."""
    hashes = bytearray()
    for id in ids:
        hashes += sha256(f"{use}\n{id}".encode()).digest()[:16]
    return np.frombuffer(hashes, "<u8").byteswap(inplace=True).reshape(-1, 2)  # a copy would double its memory
