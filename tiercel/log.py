"""The logger of tiercel, `tiercel`: how its code tells a person what it does.

INFO and above are for the terminal and log.txt, DEBUG for log.txt alone. Nothing is printed until somebody listens: a
run and each command add one handler while they last. Meanwhile records do not propagate, because a handler of the root
logger would print every line again; a handler on the logger `tiercel` gets them all.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("tiercel")
logger.addHandler(logging.NullHandler())  # or else Python itself would print warnings


class LineHandler(logging.Handler):
    """Passes lines of INFO and above to `show`, and those below to `note` if it is given, in the process of the first
    rank alone. What these raise ends the run, as a full disk must."""

    def __init__(
        self, show: Callable[[str], None], note: Callable[[str], None] | None = None, *, is_first: bool = True
    ):
        super().__init__(logging.INFO if note is None else logging.DEBUG)
        self._show, self._note = show, note or show
        self._away: set[int | None] = set()  # threads that do something else now
        self.addFilter(lambda record: is_first and record.thread not in self._away)

    def emit(self, record: logging.LogRecord) -> None:
        """Pass on one line."""
        (self._show if record.levelno >= logging.INFO else self._note)(record.getMessage())

    @contextmanager
    def without_this_thread(self) -> Iterator[None]:
        """Leave out what this thread logs inside, such as the user's own calls between two steps of a run."""
        thread = threading.get_ident()
        self._away.add(thread)
        try:
            yield
        finally:
            self._away.discard(thread)


@contextmanager
def shown_by(handler: LineHandler) -> Iterator[None]:
    """Give the records to a handler."""
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(handler.level)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


@contextmanager
def printed(show: Callable[[str], None] = print, *, is_first: bool = True) -> Iterator[None]:
    """Print the lines of a command."""
    with shown_by(LineHandler(show, is_first=is_first)):
        yield
