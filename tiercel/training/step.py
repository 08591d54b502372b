"""One step of a run: its number, its rows, how long its phases take, and its row of metrics."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.profiler import record_function

from tiercel.data.loader import StepBatch
from tiercel.reliability.heartbeat import Heartbeat


class Step:
    """The step that follows `number` updates. The watchdog is notified of each phase as it begins."""

    def __init__(self, number: int, heartbeat: Heartbeat, further: Callable[[Sequence[int]], StepBatch]):
        self.number = number
        self.further = further  # encodes this rank's rows at these global indices, in addition to the step's
        self.batch: StepBatch = StepBatch(step=number, prompts=(), rejected=())  # of this rank
        self.upcoming: Sequence[Sequence] = ()  # for each later step whose sampling begins now, its prompts
        self.metrics: dict[str, float] = {}  # of metrics.jsonl
        self.is_best = False  # by train.keep_best, once it is recorded
        self._heartbeat = heartbeat
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @property
    def updates_done(self) -> int:
        """Return the number of updates done after this step, which names its files."""
        return self.number + 1

    @property
    def prompts(self) -> Sequence:
        """Return the encoded rows of the step on this rank."""
        return self.batch.prompts

    @property
    def row_ids(self) -> list[str]:
        """Return the ids of the rows that this rank has in the step."""
        return [encoded.row.id for encoded in self.prompts]

    @contextmanager
    def phase(self, name: str, row_ids: Sequence[str] | None = None, *, timed_as: str | None = None) -> Iterator[None]:
        """Add the seconds of a phase to `time/NAME`, or to the metric of the name `timed_as`; a profile shows the phase
        as NAME. `row_ids` are the rows that are named if the phase stalls, by default all of the step."""
        self._heartbeat.begin(name, self.number, self.row_ids if row_ids is None else row_ids)
        started = time.perf_counter()
        with record_function(name):
            yield
        counted = timed_as or name
        self._seconds[counted] = self._seconds.get(counted, 0.0) + _now() - started

    @contextmanager
    def untimed_phase(self, name: str) -> Iterator[None]:
        """Begin a phase that does not count towards the step's seconds."""
        self._heartbeat.begin(name, self.number, self.row_ids)
        started = time.perf_counter()
        yield
        self._started += _now() - started

    def seconds(self, phase: str) -> float:
        """Return the seconds of a phase so far."""
        return self._seconds.get(phase, 0.0)

    def times(self) -> dict[str, float]:
        """Return `time/PHASE` of the phases so far, and `time/step` since the step began."""
        seconds = {f"time/{phase}": value for phase, value in self._seconds.items()}
        return {**seconds, "time/step": _now() - self._started}


def _now() -> float:
    """Return the time in seconds, once the device has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
