"""How far a rank is, from its process's start to its end: phase, rows, the collective it waits in. The watchdog reads
it from a thread of its own."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from tiercel.reliability.faults import faults

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Doing:
    """What a rank does at a moment."""

    phase: str = "import"
    phases: int = 0  # begun so far; ranks go through the same ones
    step: int = 0
    rows: tuple[str, ...] = ()
    collective: str | None = None  # it waits in, and where in the code
    collectives: int = 0  # entered so far


class Pulse:
    """Written by the rank's own thread, and beaten by any; each write replaces one value as a whole."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.doing = Doing()
        self.moment = time.monotonic()  # of the last progress

    def begin(self, phase: str, step: int, rows: Sequence[str] = ()) -> None:
        """A phase of a step begins."""
        phases = self.doing.phases + 1
        self.doing = replace(self.doing, phase=phase, phases=phases, step=step, rows=tuple(rows), collective=None)
        self.beat()
        self.strike(phase)

    def strike(self, site: str) -> bool:
        """Let a planned fault happen here. True where the caller is to leave out what it was about to do."""
        return faults().strike(site, self.doing.step, self.rank)

    def spoil(self, value: T, site: str) -> T:
        """Return the value, or what a planned fault makes of it."""
        return faults().spoil(value, site, self.doing.step, self.rank)

    def work_on(self, rows: Sequence[str]) -> None:
        """The phase goes on with these rows."""
        self.doing = replace(self.doing, rows=tuple(rows))
        self.beat()

    def beat(self) -> None:
        """Progress was made."""
        self.moment = time.monotonic()

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Inside, the rank waits for the others."""
        self.doing = replace(self.doing, collective=name, collectives=self.doing.collectives + 1)
        self.beat()
        yield  # an error leaves it standing: it says where the rank was
        self.doing = replace(self.doing, collective=None)
        self.beat()

    @property
    def quiet_seconds(self) -> float:
        """Since the last progress."""
        return time.monotonic() - self.moment
