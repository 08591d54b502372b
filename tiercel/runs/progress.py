"""Progress of a run for the user: a live line in a terminal, plain lines elsewhere, and everything in log.txt."""

import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import IO, TypeVar

from rich.console import Console
from rich.live import Live
from rich.progress import Progress as Bar
from rich.text import Text

from tiercel.log import LineHandler, logger, shown_by
from tiercel.messages import translated
from tiercel.regular_files import open_to_append
from tiercel.reliability.redaction import redact
from tiercel.tables import table_rows
from tiercel.writing import GO_ON, writing

SHOWN = tuple(table_rows("tiercel.runs", "progress.txt"))
TREND_STEPS = 10  # the mean reward of as many steps is compared with that of as many before
SLOW = 0.5  # of a step; a phase that takes at least this share is named


class Progress:
    """Shows what is logged and each step on stderr, and writes log.txt; a context manager. Without a log it does
    neither, because another rank does."""

    def __init__(self, log: Path | None, total_steps: int, log_every: int):
        self.total_steps = total_steps
        self.log_every = log_every
        self._console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=log is None)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._is_terminal = sys.stderr.isatty() and log is not None
        self._log = Path(os.devnull) if log is None else log
        with writing(self._log, GO_ON):
            self._file: IO[str] = self._log.open("a") if log is None else open_to_append(log)
        self.handler = LineHandler(self.say, self.note, is_first=log is not None)
        self._logged = shown_by(self.handler)
        self._first: tuple[int, float] | None = None
        self._rewards = deque[float](maxlen=2 * TREND_STEPS)

    def __enter__(self) -> "Progress":
        if self._is_terminal:
            self._live.start()
        self._logged.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._logged.__exit__(None, None, None)
        if self._is_terminal:
            self._live.stop()
        self._file.close()

    def say(self, text: str) -> None:
        """Print a line that stays, and log it."""
        text = redact(text)
        self._write(text)
        self._console.print(Text(translated(text)))

    def note(self, text: str) -> None:
        """Write a line to log.txt only."""
        self._write(redact(text))

    def step(self, row: Mapping[str, float]) -> None:
        """Show a finished step: as the live line in a terminal, or as a line every `log_every` steps elsewhere."""
        step = int(row["step"])
        remarks = {"reward/mean": self._trend(row), "time/step": slow_phase(row)}
        line = f"step {step}/{self.total_steps}  " + "  ".join(
            f"{label} {form.format(row[key])}{remarks.get(key, '')}"
            for key, label, form in SHOWN
            if row.get(key) is not None
        )
        if (left := self._time_left(step)) is not None:
            line += f"  left {left}"
        self._write(line)
        is_due = step % self.log_every == 0 or step == self.total_steps
        if self._is_terminal:
            filled = 24 * step // max(1, self.total_steps)
            self._live.update(Text("━" * filled + "╌" * (24 - filled) + "  " + line), refresh=True)
        elif is_due:
            self._console.print(Text(line))

    def _trend(self, row: Mapping[str, float]) -> str:
        """Return how much the mean reward has changed, or an empty string if there are too few steps to compare."""
        if "reward/mean" in row:
            self._rewards.append(row["reward/mean"])
        if len(self._rewards) < 2 * TREND_STEPS:
            return ""
        values = list(self._rewards)
        change = statistics.fmean(values[TREND_STEPS:]) - statistics.fmean(values[:TREND_STEPS])
        return f" ({change:+.3f} in {TREND_STEPS})"

    def _time_left(self, step: int) -> str | None:
        now = time.monotonic()
        first_step, began = self._first = self._first or (step, now)
        if step <= first_step:
            return None
        seconds = round((now - began) / (step - first_step) * (self.total_steps - step))
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"

    def _write(self, text: str) -> None:
        with writing(self._log, GO_ON):
            self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
            self._file.flush()


def slow_phase(row: Mapping[str, float]) -> str:
    """Return the name and the share of the phase that takes most of a step, or an empty string if none takes half of
    it."""
    phases = {key.removeprefix("time/"): value for key, value in row.items() if key.startswith("time/")}
    whole = phases.pop("step", 0.0)
    name, seconds = max(phases.items(), key=lambda phase: phase[1], default=("", 0.0))
    return f" ({name} {seconds / whole:.0%})" if whole > 0 and seconds >= SLOW * whole else ""


T = TypeVar("T")
SHOW_AFTER_SECONDS = 2.0
SAY_SECONDS = 10.0


@contextmanager
def waiting(what: str, show_after: float = SHOW_AFTER_SECONDS) -> Iterator[None]:
    """Log `what` if the work inside takes longer than `show_after` seconds: in another thread, never after the work has
    ended."""
    timer = threading.Timer(show_after, logger.info, [f"{what} ..."])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


@contextmanager
def counting(what: str, total: int, *, is_first: bool = True) -> Iterator[Callable[[int], None]]:
    """Yield a function that takes how many of `total` are done: it moves a bar in a terminal, and elsewhere logs a line
    every SAY_SECONDS."""
    is_shown = is_first and sys.stderr.isatty()
    spoken = time.monotonic()
    with Bar(console=Console(stderr=True), transient=True, disable=not is_shown) as bar:
        task = bar.add_task(translated(what), total=total)

        def show(done: int) -> None:
            nonlocal spoken
            bar.update(task, completed=done)
            if not is_shown and time.monotonic() - spoken > SAY_SECONDS:
                spoken = time.monotonic()
                logger.info(f"{what}: {done:,} of {total:,}")

        yield show


@contextmanager
def entered(context: AbstractContextManager[T], what: str) -> Iterator[T]:
    """Enter a context that may take long to start, and stay in it. `what` is logged if it does."""
    with ExitStack() as stack:
        with waiting(what):
            value = stack.enter_context(context)
        yield value
