"""Encode the rows of steps ahead of time in worker processes. The result is the same for any number of workers."""

import atexit
import multiprocessing
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from tiercel.data.encoding import decoding_once
from tiercel.data.order import RowOrder, indices_of_step, rank_slice
from tiercel.data.rows import reject
from tiercel.data.stores import view_of
from tiercel.errors import DataError, TiercelError, TrainingError
from tiercel.processes import end_with_parent, signal_name
from tiercel.types import EncodedPrompt, Example, RejectedRow, Row

Encoded = TypeVar("Encoded", EncodedPrompt, Example)
Encode = Callable[[Row, int], Encoded]  # takes (row, index); raises DataError for a row that cannot be used

BYTES_AHEAD = 1 << 26  # that a worker has encoded and not yet delivered; a larger slice goes alone


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
    step, ahead by at most BYTES_AHEAD. Use the loader as a context manager: closing it ends the workers.

    Raises TrainingError if a worker ends early, or if `encode` fails with an error that the row did not cause.
    """

    def __init__(
        self, rows: Sequence[Row], encode: Encode[Encoded], order: StepOrder, *, start: int, stop: int, workers: int
    ):
        if order.rows.row_count != len(rows):
            raise ValueError(f"the order is for {order.rows.row_count} rows, not for {len(rows)}")
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

    def __exit__(self, *_: object) -> None:
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
        """End the workers. Afterwards, no step can be asked for."""
        atexit.unregister(self.close)
        self._steps = iter(())
        # It is safe to kill them: they have no open files and no shared memory.
        for process, _ in self._workers:
            process.kill()
        for process, results in self._workers:
            process.join()
            results.close()
        self._workers = []

    def _start_workers(self, start: int, stop: int, count: int) -> None:
        # A forked process shares the rows and the tokenizer without a copy. Forking is only safe on Linux.
        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        if count:
            # This runs before the exit function of multiprocessing, which would wait for workers that ignore SIGTERM.
            atexit.register(self.close)
        with _environment("TOKENIZERS_PARALLELISM", "false"):
            for number in range(count):
                receiving, sending = context.Pipe(duplex=False)
                share = partial(_share, self._rows, self._encode, self._order, number, count)
                work = (share, range(start, stop), sending, os.getpid())
                process = context.Process(target=_work, args=work, name=f"tiercel-loader-{number}", daemon=True)
                process.start()
                # Now only the worker has the sending end, so the stream ends when the worker does.
                sending.close()
                self._workers.append((process, receiving))


def encode_rows(
    step: int, rows: Sequence[Row], encode: Encode[Encoded], places: Sequence[tuple[int, int]]
) -> StepBatch[Encoded]:
    """Encode rows, given as (global index, row number), in this process. Raises what `StepLoader` raises."""
    return _batch(step, _encode_slice(rows, encode, places))


def _batch(step: int, outcomes: Sequence[Any]) -> StepBatch:
    prompts: list[Any] = []
    rejected: list[RejectedRow] = []
    for outcome in outcomes:
        if isinstance(outcome, TiercelError):  # an error that the row did not cause
            raise outcome
        (rejected if isinstance(outcome, RejectedRow) else prompts).append(outcome)
    return StepBatch(step=step, prompts=tuple(prompts), rejected=tuple(rejected))


def _receive(process: BaseProcess, results: Connection) -> list[Any]:
    """Receive a worker's slice of the next step. Raises TrainingError if the worker has ended."""
    try:
        return results.recv()
    except (EOFError, OSError) as error:
        process.join(timeout=10)
        code = process.exitcode
        if code is not None and code < 0:
            end = f"was killed by {signal_name(-code)}"
            remedy = "; this usually means that memory ran out: lower data.workers" if code == -signal.SIGKILL else ""
        else:
            end, remedy = f"ended with exit code {code}", ""
        raise TrainingError(f"{process.name} (process {process.pid}) {end}{remedy}") from error


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
    except TiercelError as error:
        return error
    except Exception as error:  # such as one of the checkpoint's template or tokenizer; the run reports it
        trace = traceback.format_exc()
        message = f"encoding row {row.id} ({row.file}:{row.line}) failed with {type(error).__name__}: {error}\n{trace}"
        return TrainingError(message)


def _share(rows: Sequence[Row], encode: Encode, order: StepOrder, worker: int, workers: int, step: int) -> list[Any]:
    """Encode one worker's rows of a step."""
    return _encode_slice(rows, encode, rank_slice(order.rows_of_step(step), worker, workers))


def _work(share: Callable[[int], list[Any]], steps: range, results: Connection, parent: int) -> None:
    """Run a worker: encode its share of every step, in order, as far ahead as BYTES_AHEAD allows."""
    _isolate(parent)
    outbox = _Outbox(results)
    for step in steps:
        outbox.put(ForkingPickler.dumps(share(step)))
    outbox.put(None)
    outbox.sender.join()


class _Outbox:
    """Sends what a worker has encoded, in a thread. The worker waits while BYTES_AHEAD are on their way."""

    def __init__(self, results: Connection):
        self._waiting = queue.SimpleQueue[memoryview | None]()
        self._room = threading.Condition()
        self._bytes = 0
        self._results = results
        self.sender = threading.Thread(target=self._send, daemon=True)
        self.sender.start()

    def put(self, encoded: memoryview | None) -> None:
        """Send a slice, later; None ends the sender."""
        size = len(encoded or b"")
        with self._room:
            self._room.wait_for(lambda: self._bytes == 0 or self._bytes + size <= BYTES_AHEAD)
            self._bytes += size
        self._waiting.put(encoded)

    def _send(self) -> None:
        while (encoded := self._waiting.get()) is not None:
            self._results.send_bytes(encoded)
            with self._room:
                self._bytes -= len(encoded)
                self._room.notify()


def _isolate(parent: int) -> None:
    """Separate a worker from its parent's signals, threads and shared memory. It ends when the parent ends."""
    # Ctrl-C, or SIGTERM from a scheduler, goes to the whole process group; the parent decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent(parent)
    torch.set_num_threads(1)
    # torch would send each tensor as a file in /dev/shm and a file descriptor. Containers have 64 MB of /dev/shm and
    # 1024 descriptors by default. A copy through the pipe needs neither, and costs far less than decoding.
    ForkingPickler.register(Tensor, _reduce_tensor)


def _reduce_tensor(tensor: Tensor) -> tuple[Callable[[np.ndarray], Tensor], tuple[np.ndarray]]:
    return torch.from_numpy, (tensor.numpy(),)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for processes that are started inside the context."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
