"""Work through tasks in several processes; results come in the order of the tasks."""

import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from tiercel.errors import TrainingError
from tiercel.processes import end_with_parent, signal_name

Task = TypeVar("Task")
Result = TypeVar("Result")
MOST_PROCESSES = 8


def blocks_of(rows: int, size: int) -> list[range]:
    """Divide the numbers of rows into blocks of at most `size`."""
    return [range(start, min(start + size, rows)) for start in range(0, rows, size)]


def spread(work: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[Result]:
    """Yield `work(task)` for each task, in order. On Linux, processes of this machine's cores share the tasks; they
    hold at most one result each that was not asked for yet. Raises what `work` raises, and TrainingError if a process
    ends early."""
    count = min(len(os.sched_getaffinity(0)), MOST_PROCESSES, len(tasks)) if sys.platform == "linux" else 1
    if count < 2 or multiprocessing.current_process().daemon:  # a daemon may not have children
        yield from map(work, tasks)
        return
    context: Any = multiprocessing.get_context("fork")
    workers: list[tuple[BaseProcess, Connection]] = []
    try:
        for number in range(count):
            receiving, sending = context.Pipe(duplex=False)
            share = (work, tasks[number::count], sending, os.getpid())
            process = context.Process(target=_work, args=share, name=f"tiercel-rows-{number}", daemon=True)
            process.start()
            sending.close()  # now only the worker has it, so the stream ends when the worker does
            workers.append((process, receiving))
        for number in range(len(tasks)):
            yield _received(*workers[number % count])
    finally:
        for process, _ in workers:
            process.kill()
        for process, results in workers:
            process.join()
            results.close()


def _received(process: BaseProcess, results: Connection) -> Any:
    try:
        is_error, value = results.recv()
    except (EOFError, OSError) as error:
        process.join(timeout=10)
        code = process.exitcode or 0
        end = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        raise TrainingError(f"{process.name} (process {process.pid}) {end}") from error
    if is_error:
        raise value
    return value


def _work(work: Callable[[Any], Any], tasks: Sequence[Any], results: Connection, parent: int) -> None:
    gc.freeze()  # otherwise the collector would copy the pages of the parent's objects
    gc.set_threshold(100_000)  # rows make many objects and few cycles
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when it ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads of a tokenizer are not there after a fork
    for task in tasks:
        try:
            results.send((False, work(task)))
        except Exception as error:  # the parent raises it
            results.send((True, error))
            return
