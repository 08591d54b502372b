"""Steps of encoded rows, made ahead of time by worker processes, the same for any number of them."""

import atexit
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from tiercel.data.order import RowOrder, indices_of_step, rank_slice
from tiercel.data.rows import reject
from tiercel.errors import DataError, TiercelError, TrainingError
from tiercel.types import EncodedConversation, EncodedPrompt, RejectedRow, Row

Encoded = TypeVar("Encoded", EncodedPrompt, EncodedConversation)
Encode = Callable[[Row, int], Encoded | RejectedRow]

_WAITING_SLICES = 1  # that a worker keeps beside the one it is sending and the one it is making
_PARENT_CHECK_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch(Generic[Encoded]):
    """What one step trains on, in the global order; rejected rows leave it short."""

    step: int
    prompts: tuple[Encoded, ...]
    rejected: tuple[RejectedRow, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOrder:
    """Which rows belong to a step of this rank: all that decides it, and nothing else does."""

    rows: RowOrder
    prompts_per_step: int  # of all ranks together
    end: int | None = None  # global index that the run stops before; the last step may run short
    rank: int = 0
    world_size: int = 1

    def rows_of_step(self, step: int) -> list[tuple[int, int]]:
        """(global index, row number) of this rank's rows, in the global order."""
        indices = rank_slice(indices_of_step(step, self.prompts_per_step, self.end), self.rank, self.world_size)
        return [(index, self.rows.row(index)) for index in indices]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Failure:
    """An error that is no row's fault; raised where the step is asked for."""

    error: TiercelError


class StepLoader(Generic[Encoded]):
    """Iterates over `StepBatch`es of the steps from `start` to before `stop`.

    `encode(row, index)` decodes, resizes and tokenises a row; a DataError that it raises rejects the row. With
    `workers` = 0 it runs here, when a step is asked for. With more, every worker encodes its slice of each step, a
    few steps ahead. Use it as a context manager: closing it ends the workers.

    Raises TrainingError where a worker dies or `encode` fails in a way that is not the row's fault.
    """

    def __init__(
        self, rows: Sequence[Row], encode: Encode[Encoded], order: StepOrder, *, start: int, stop: int, workers: int
    ):
        if order.rows.row_count != len(rows):
            raise ValueError(f"the order is one of {order.rows.row_count} rows, not of {len(rows)}")
        self._rows = rows
        self._encode: Encode[Encoded] = encode
        self._order = order
        self._steps = iter(range(start, stop))
        self.steps_left = max(0, stop - start)
        self._workers: list[tuple[BaseProcess, Connection]] = []
        if start < stop:
            self._start_workers(start, stop, workers)

    def __enter__(self) -> "StepLoader[Encoded]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[StepBatch[Encoded]]:
        return self

    def __next__(self) -> StepBatch[Encoded]:
        step = next(self._steps)
        self.steps_left -= 1
        if self._workers:
            outcomes = [outcome for process, results in self._workers for outcome in _receive(process, results)]
        else:
            outcomes = _encode_slice(self._rows, self._encode, self._order.rows_of_step(step))
        return _batch(step, outcomes)

    def close(self) -> None:
        """End the workers; no further step can be asked for."""
        atexit.unregister(self.close)
        self._steps = iter(())
        # They hold nothing that needs an orderly end: no files, no shared memory.
        for process, _ in self._workers:
            process.kill()
        for process, results in self._workers:
            process.join()
            results.close()
        self._workers = []

    def _start_workers(self, start: int, stop: int, count: int) -> None:
        # Forking shares the rows and the tokenizer without copying; elsewhere than on Linux it is not safe.
        context: ForkContext | SpawnContext = (
            multiprocessing.get_context("fork") if sys.platform == "linux" else multiprocessing.get_context("spawn")
        )
        if count:
            # Before multiprocessing's own, which would wait for workers that ignore its SIGTERM.
            atexit.register(self.close)
        with _environment("TOKENIZERS_PARALLELISM", "false"):
            for number in range(count):
                receiving, sending = context.Pipe(duplex=False)
                process = context.Process(
                    target=_work,
                    args=(
                        self._rows,
                        self._encode,
                        self._order,
                        range(start, stop),
                        (number, count),
                        sending,
                        os.getpid(),
                    ),
                    name=f"tiercel-loader-{number}",
                    daemon=True,
                )
                process.start()
                # The worker now holds the only sending end, so its death is the end of the stream.
                sending.close()
                self._workers.append((process, receiving))


def encode_rows(
    step: int, rows: Sequence[Row], encode: Encode[Encoded], places: Sequence[tuple[int, int]]
) -> StepBatch[Encoded]:
    """Rows by (global index, row number), encoded here and now. Raises as `StepLoader`."""
    return _batch(step, _encode_slice(rows, encode, places))


def _batch(step: int, outcomes: Sequence[Any]) -> StepBatch:
    prompts: list[Any] = []
    rejected: list[RejectedRow] = []
    for outcome in outcomes:
        if isinstance(outcome, _Failure):
            raise outcome.error
        (rejected if isinstance(outcome, RejectedRow) else prompts).append(outcome)
    return StepBatch(step=step, prompts=tuple(prompts), rejected=tuple(rejected))


def _receive(process: BaseProcess, results: Connection) -> list[Any]:
    """A worker's slice of the next step. Raises TrainingError where the worker is gone."""
    try:
        return results.recv()
    except (EOFError, OSError) as error:
        process.join(timeout=10)
        code = process.exitcode
        if code is not None and code < 0:
            end = f"was killed by {signal.Signals(-code).name}"
            remedy = "; SIGKILL is mostly the system short of memory: lower data.workers" if code == -9 else ""
        else:
            end, remedy = f"ended with exit code {code}", ""
        raise TrainingError(f"{process.name} (process {process.pid}) {end}{remedy}") from error


def _encode_slice(rows: Sequence[Row], encode: Encode, places: Sequence[tuple[int, int]]) -> list[Any]:
    return [_encode_row(rows[number], encode, index) for index, number in places]


def _encode_row(row: Row, encode: Encode, index: int) -> Any:
    try:
        return encode(row, index)
    except DataError as error:
        return reject(row, error)
    except TiercelError as error:
        return _Failure(error=error)
    except Exception as error:  # the checkpoint's template and tokenizer run in here, and must not end a worker unseen
        trace = traceback.format_exc()
        message = f"encoding row {row.id} ({row.file}:{row.line}) failed with {type(error).__name__}: {error}\n{trace}"
        return _Failure(error=TrainingError(message))


def _work(
    rows: Sequence[Row],
    encode: Encode,
    order: StepOrder,
    steps: range,
    share: tuple[int, int],
    results: Connection,
    parent: int,
) -> None:
    """A worker: its share of every step, in order, as far ahead as the queue and the pipe let it."""
    _isolate(parent)
    waiting: queue.Queue[memoryview] = queue.Queue(maxsize=_WAITING_SLICES)
    threading.Thread(target=_send, args=(waiting, results), daemon=True).start()
    for step in steps:
        outcomes = _encode_slice(rows, encode, rank_slice(order.rows_of_step(step), *share))
        waiting.put(ForkingPickler.dumps(outcomes))
    waiting.join()


def _send(waiting: "queue.Queue[memoryview]", results: Connection) -> None:
    while True:
        results.send_bytes(waiting.get())
        waiting.task_done()


def _isolate(parent: int) -> None:
    """Make a worker independent of its parent's signals, threads and shared memory, but not of its life."""
    # A Ctrl-C or a scheduler's SIGTERM reaches the whole process group; the parent decides when workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(parent,), daemon=True).start()
    torch.set_num_threads(1)
    # torch would send each tensor as a file in /dev/shm and a descriptor: containers give 64 MB of the one by
    # default and 1024 of the other. Copied through the pipe, a tensor needs neither, at a cost far below decoding's.
    ForkingPickler.register(Tensor, _reduce_tensor)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_SECONDS)
    os._exit(1)


def _reduce_tensor(tensor: Tensor) -> tuple[Callable[[np.ndarray], Tensor], tuple[np.ndarray]]:
    return _tensor, (tensor.numpy(),)


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for processes started within."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
