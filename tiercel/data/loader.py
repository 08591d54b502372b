"""Encode the rows of steps ahead of time in worker processes. The result is the same for any number of workers."""

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, Generic, TypeVar

from tiercel.data.encoding import decoding_once
from tiercel.data.order import RowOrder, indices_of_step, rank_slice
from tiercel.data.parallel_map import Workers
from tiercel.data.rows import reject
from tiercel.data.stores import view_of
from tiercel.errors import DataError, TiercelError, TrainingError
from tiercel.types import EncodedPrompt, Example, RejectedRow, Row

Encoded = TypeVar("Encoded", EncodedPrompt, Example)
Encode = Callable[[Row, int], Encoded]  # takes (row, index); raises DataError for a row that cannot be used


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch(Generic[Encoded]):
    """Holds the encoded rows of one step, in the global order. Rejected rows are missing from `prompts`."""

    step: int
    prompts: tuple[Encoded, ...]
    rejected: tuple[RejectedRow, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOrder:
    """Holds everything that decides which rows are in a step of this rank."""

    rows: RowOrder
    prompts_per_step: int  # of all ranks together
    end: int | None = None  # the global index before which the run stops; the last step may have fewer rows
    rank: int = 0
    world_size: int = 1

    def rows_of_step(self, step: int) -> list[tuple[int, int]]:
        """Return (global index, row number) of this rank's rows, in the global order."""
        indices = rank_slice(indices_of_step(step, self.prompts_per_step, self.end), self.rank, self.world_size)
        return [(index, self.rows.row(index)) for index in indices]


class StepLoader(Generic[Encoded]):
    """Iterates over the `StepBatch`es of the steps from `start` to before `stop`.

    `encode(row, index)` decodes, resizes and tokenises a row; if it raises DataError, the row is rejected. With
    `workers` = 0 it runs in this process, when a step is asked for. With more, every worker encodes its slice of each
    step ahead of time. Use the loader as a context manager: closing it ends the workers.

    Raises TrainingError if a worker ends early, or if `encode` fails with an error that the row did not cause.
    """

    def __init__(
        self, rows: Sequence[Row], encode: Encode[Encoded], order: StepOrder, *, start: int, stop: int, workers: int
    ):
        if order.rows.row_count != len(rows):
            raise ValueError(f"the order is for {order.rows.row_count} rows, not for {len(rows)}")
        self._steps = iter(range(start, stop))
        self.steps_left = max(0, stop - start)
        self._slices_of_step = max(1, workers)
        share = partial(_share, rows, encode, order, self._slices_of_step)
        slices = range(start * self._slices_of_step, stop * self._slices_of_step)
        self.workers: Workers[list[Any]] | None = None
        if workers and slices:
            remedy = "; this usually means that memory ran out: lower data.workers"
            self.workers = Workers(share, slices, workers, name="tiercel-loader", remedy=remedy)
        self._slices = map(share, slices) if self.workers is None else iter(self.workers)

    def __enter__(self) -> "StepLoader[Encoded]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[StepBatch[Encoded]]:
        return self

    def __next__(self) -> StepBatch[Encoded]:
        step = next(self._steps)
        self.steps_left -= 1
        return _batch(step, chain.from_iterable(islice(self._slices, self._slices_of_step)))

    def close(self) -> None:
        """End the workers. Afterwards, no step can be asked for."""
        self._steps = iter(())
        if self.workers is not None:
            self.workers.close()


def encode_rows(
    step: int, rows: Sequence[Row], encode: Encode[Encoded], places: Sequence[tuple[int, int]]
) -> StepBatch[Encoded]:
    """Encode rows, given as (global index, row number), in this process. Raises what `StepLoader` raises."""
    return _batch(step, _encode_slice(rows, encode, places))


def _batch(step: int, outcomes: Iterable[Any]) -> StepBatch:
    prompts: list[Any] = []
    rejected: list[RejectedRow] = []
    for outcome in outcomes:
        (rejected if isinstance(outcome, RejectedRow) else prompts).append(outcome)
    return StepBatch(step=step, prompts=tuple(prompts), rejected=tuple(rejected))


def _share(rows: Sequence[Row], encode: Encode, order: StepOrder, slices_of_step: int, number: int) -> list[Any]:
    """Encode a slice of a step. The slices are numbered through all steps."""
    step, place = divmod(number, slices_of_step)
    return _encode_slice(rows, encode, rank_slice(order.rows_of_step(step), place, slices_of_step))


def _encode_slice(rows: Sequence[Row], encode: Encode, places: Sequence[tuple[int, int]]) -> list[Any]:
    view = view_of(rows)
    with decoding_once():
        return [_encode_row(view.look(number), encode, index) for index, number in places]


def _encode_row(row: Row | RejectedRow, encode: Encode, index: int) -> Any:
    if isinstance(row, RejectedRow):
        return row
    try:
        return encode(row, index)
    except DataError as error:
        return reject(row, error)
    except TiercelError:
        raise
    except Exception as error:  # such as one of the checkpoint's template or tokenizer; the run reports it
        trace = traceback.format_exc()
        message = f"encoding row {row.id} ({row.file}:{row.line}) failed with {type(error).__name__}: {error}\n{trace}"
        raise TrainingError(message) from error
