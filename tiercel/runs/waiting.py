"""Telling the user what takes long."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeVar

T = TypeVar("T")
MOMENT_SECONDS = 2.0


@contextmanager
def waiting(say: Callable[[str], None], what: str, moment: float = MOMENT_SECONDS) -> Iterator[None]:
    """Say `what` where the work inside takes longer than `moment` seconds. `say` is called in another thread, never
    after the work has ended."""
    timer = threading.Timer(moment, say, [f"{what} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


@contextmanager
def entered(context: AbstractContextManager[T], say: Callable[[str], None], what: str) -> Iterator[T]:
    """Enter a context whose start may take long, and stay in it; `what` is said where it does."""
    with ExitStack() as stack:
        with waiting(say, what):
            value = stack.enter_context(context)
        yield value
