"""Seconds of the phases of a step, which the watchdog hears of as they begin."""

import time
from collections.abc import Sequence

import torch

from tiercel.reliability.pulse import Pulse


class Clock:
    """One step's; a phase lasts until the next begins."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._start = self._last = time.perf_counter()
        self._phase: str | None = None
        self._seconds: dict[str, float] = {}

    def begin(self, phase: str, step: int, rows: Sequence[str] = ()) -> None:
        """`rows`: ids of those that the phase is about."""
        self._end()
        self._phase = phase
        self._pulse.begin(phase, step, rows)

    def metrics(self) -> dict[str, float]:
        """`time/PHASE` of the phases so far, and `time/step`."""
        self._end()
        self._phase = None
        seconds = {f"time/{phase}": value for phase, value in self._seconds.items()}
        return {**seconds, "time/step": time.perf_counter() - self._start}

    def _end(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._phase is not None:
            self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._last
        self._last = now
