"""Work through tasks in several processes; results come in the order of the tasks."""

import atexit
import gc
import multiprocessing
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import cycle, islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from tiercel.errors import TrainingError
from tiercel.processes import end_with_parent, signal_name

Task = TypeVar("Task")
Result = TypeVar("Result")
MOST_PROCESSES = 8
BYTES_AHEAD = 1 << 26  # of results that a process has and that were not asked for yet; a larger one goes alone


def blocks_of(rows: int, size: int) -> list[range]:
    """Divide the numbers of rows into blocks of at most `size`."""
    return [range(start, min(start + size, rows)) for start in range(0, rows, size)]


def spread(work: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[Result]:
    """Yield `work(task)` for each task, in order. On Linux, processes of this machine's cores share the tasks. Raises
    what `Workers` raises."""
    count = min(len(os.sched_getaffinity(0)), MOST_PROCESSES, len(tasks)) if sys.platform == "linux" else 1
    if count < 2 or multiprocessing.current_process().daemon:  # a daemon may not have children
        yield from map(work, tasks)
        return
    with closing(Workers(partial(_with_rare_collections, work), tasks, count, name="tiercel-rows")) as workers:
        yield from workers


def _with_rare_collections(work: Callable[[Task], Result], task: Task) -> Result:
    gc.set_threshold(100_000)  # rows make many objects and few cycles
    return work(task)


class Workers(Generic[Result]):
    """Processes that share tasks, each every `count`-th. They work ahead by at most BYTES_AHEAD each.

    Iterating yields `work(task)` for each task, in order. It raises what `work` raises, and TrainingError if a process
    ends early, with `remedy` if that was for lack of memory.
    """

    def __init__(
        self, work: Callable[[Any], Result], tasks: Sequence[Any], count: int, *, name: str, remedy: str = ""
    ) -> None:
        self._remedy = remedy
        self.processes: list[tuple[BaseProcess, Connection]] = []
        # It runs before the exit function of multiprocessing, which would wait for processes that ignore SIGTERM.
        atexit.register(self.close)
        # A forked process shares the rows and the tokenizer without a copy. Forking is only safe on Linux.
        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        try:
            for number in range(count):
                receiving, sending = context.Pipe(duplex=False)
                share = (work, tasks[number::count], sending, os.getpid())
                process = context.Process(target=_work, args=share, name=f"{name}-{number}", daemon=True)
                process.start()
                sending.close()  # now only the process has it, so the stream ends when the process does
                self.processes.append((process, receiving))
        except BaseException:  # such as a limit of processes
            self.close()
            raise
        self._turns = islice(cycle(self.processes), len(tasks))

    def __iter__(self) -> Iterator[Result]:
        return self

    def __next__(self) -> Result:
        return self._received(*next(self._turns))

    def close(self) -> None:
        """End the processes. It is safe to kill them: they have no open files and no shared memory."""
        atexit.unregister(self.close)
        for process, _ in self.processes:
            process.kill()
        for process, results in self.processes:
            process.join()
            results.close()

    def _received(self, process: BaseProcess, results: Connection) -> Result:
        try:
            is_error, value = results.recv()
        except (EOFError, OSError) as error:
            process.join(timeout=10)
            code = process.exitcode or 0
            end = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {process.exitcode}"
            remedy = self._remedy if code == -signal.SIGKILL else ""
            raise TrainingError(f"{process.name} (process {process.pid}) {end}{remedy}") from error
        if is_error:
            raise value
        return value


def _work(work: Callable[[Any], Any], tasks: Sequence[Any], results: Connection, parent: int) -> None:
    """Send the result of each task, or the error that ends this process."""
    _isolate(parent)
    outbox = _Outbox(results)
    for task in tasks:
        try:
            outbox.put(ForkingPickler.dumps((False, work(task))))
        except Exception as error:  # the parent raises it
            outbox.put(ForkingPickler.dumps((True, error)))
            break
    outbox.put(None)
    outbox.sender.join()


def _isolate(parent: int) -> None:
    """Separate a process from its parent's signals, threads and memory. It ends when the parent ends."""
    gc.freeze()  # otherwise the collector would copy the pages of the parent's objects
    # Ctrl-C, or SIGTERM from a scheduler, goes to the whole process group; the parent decides when its workers end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads of a tokenizer are not there after a fork
    torch.set_num_threads(1)
    # torch would send each tensor as a file in /dev/shm and a file descriptor. Containers have 64 MB of /dev/shm and
    # 1024 descriptors by default. A copy through the pipe needs neither, and costs far less than decoding.
    ForkingPickler.register(Tensor, _reduce_tensor)


def _reduce_tensor(tensor: Tensor) -> tuple[Callable[[np.ndarray], Tensor], tuple[np.ndarray]]:
    return torch.from_numpy, (tensor.numpy(),)


class _Outbox:
    """Sends results in a thread. The process waits while BYTES_AHEAD are on their way."""

    def __init__(self, results: Connection):
        self._waiting = queue.SimpleQueue[memoryview | None]()
        self._room = threading.Condition()
        self._bytes = 0
        self._results = results
        self.sender = threading.Thread(target=self._send, daemon=True)
        self.sender.start()

    def put(self, result: memoryview | None) -> None:
        """Send a result, later; None ends the sender."""
        size = len(result or b"")
        with self._room:
            self._room.wait_for(lambda: self._bytes == 0 or self._bytes + size <= BYTES_AHEAD)
            self._bytes += size
        self._waiting.put(result)

    def _send(self) -> None:
        while (result := self._waiting.get()) is not None:
            self._results.send_bytes(result)
            with self._room:
                self._bytes -= len(result)
                self._room.notify()
