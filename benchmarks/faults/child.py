"""Work in a forked process, which may take limits and hooks upon itself, and may die of them."""

import multiprocessing
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tqdm import tqdm

Send = Callable[[Any], None]


def collect(work: Callable[[Send], None], seconds: float) -> tuple[list[Any], str | None]:
    """What `work` sent, and how it ended: None where it returned, else what it died of."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(work, sending), daemon=True)
    process.start()
    sending.close()
    deadline = time.monotonic() + seconds
    received: list[Any] = []
    try:
        while receiving.poll(max(0.0, deadline - time.monotonic())):
            received.append(receiving.recv())
    except EOFError:
        process.join()
        return received, None if process.exitcode == 0 else f"the process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()
        receiving.close()
    return received, f"the process was not done after {seconds:g} s"


def take_own_locks() -> None:
    """Leave the lock of progress bars to the process that was forked: it is one for both, and a fork that is killed
    while it has the lock never gives it back."""
    tqdm.set_lock(threading.RLock())


def _run(work: Callable[[Send], None], sending: Connection) -> None:
    take_own_locks()
    work(sending.send)
