"""The progress of a rank, from the start of its process to its end: phase, rows, and the collective it waits in. The
watchdog reads it from another thread."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from tiercel.reliability.faults import faults

T = TypeVar("T")
HEARTBEATS = "pulse"  # folder of a run: what each rank is doing while the run is open; `tiercel view` shows it


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """What a rank is doing at one moment."""

    phase: str = "import"
    phases: int = 0  # started so far; all ranks go through the same phases
    step: int = 0
    rows: tuple[str, ...] = ()
    collective: str | None = None  # the collective that the rank waits in, and its place in the code


class Heartbeat:
    """What this rank is doing. The rank's main thread writes it, and any thread may report progress. Each write
    replaces one whole value, so readers need no lock."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.activity = Activity()
        self.last_progress_at = time.monotonic()
        self.is_away = False  # the caller of the steps works: its time is no stall
        self.file: Path | None = None  # where the watchdog shows what the rank is doing, while its run is open

    def begin(self, phase: str, step: int, rows: Sequence[str] = ()) -> None:
        """Start a phase of a step."""
        phases = self.activity.phases + 1
        self.activity = replace(self.activity, phase=phase, phases=phases, step=step, rows=tuple(rows), collective=None)
        self.beat()
        self.maybe_fail(phase)

    def maybe_fail(self, site: str) -> bool:
        """Perform a fault if one is planned here. Returns True if the caller must skip its next action."""
        return faults().maybe_fail(site, self.activity.step, self.rank)

    def maybe_corrupt(self, value: T, site: str) -> T:
        """Return the value, or what a planned fault makes of it."""
        return faults().maybe_corrupt(value, site, self.activity.step, self.rank)

    def work_on(self, rows: Sequence[str]) -> None:
        """Continue in the same phase with these rows."""
        self.activity = replace(self.activity, rows=tuple(rows))
        self.beat()

    def beat(self) -> None:
        """Report progress."""
        self.last_progress_at = time.monotonic()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Leave out the time inside, in which the caller of the Python API works."""
        self.is_away = True
        try:
            yield
        finally:
            self.beat()
            self.is_away = False

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Mark the time inside the context as waiting for the other ranks."""
        self.activity = replace(self.activity, collective=name)
        self.beat()
        yield  # after an error the name stays, to show where the rank was
        self.activity = replace(self.activity, collective=None)
        self.beat()

    @contextmanager
    def shown_in(self, file: Path) -> Iterator[None]:
        """Let the watchdog write what the rank is doing to this file, which is removed at the end."""
        self.file = file
        try:
            yield
        finally:
            self.file = None
            with suppress(OSError):
                file.unlink(missing_ok=True)
                file.parent.rmdir()

    @property
    def quiet_seconds(self) -> float:
        """Return the seconds since the last progress."""
        return time.monotonic() - self.last_progress_at
