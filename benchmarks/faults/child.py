"""Work in a forked process, which may take limits and hooks upon itself, and may die from them."""

import multiprocessing
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tqdm import tqdm

Send = Callable[[Any], None]


def collect(work: Callable[[Send], None], seconds: float) -> tuple[list[Any], str | None]:
    """Return what `work` sent, and how it ended: None if it returned, else what it died from."""
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
    """Give this process its own lock of progress bars. The lock is shared with the parent, and a fork that is killed
    while it holds it never releases it."""
    tqdm.set_lock(threading.RLock())


def _run(work: Callable[[Send], None], sending: Connection) -> None:
    take_own_locks()
    work(sending.send)
