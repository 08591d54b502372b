"""One step of a run: which it is, which rows it is about, how long its phases take, and its row of metrics."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.profiler import record_function

from tiercel.data.loader import StepBatch
from tiercel.reliability.heartbeat import Heartbeat


class Step:
    """The step that follows `number` updates. The watchdog hears of each phase as it begins."""

    def __init__(self, number: int, heartbeat: Heartbeat, further: Callable[[Sequence[int]], StepBatch]):
        self.number = number
        self.further = further  # encodes this rank's rows at these global indices, beside those of the step
        self.batch: StepBatch = StepBatch(step=number, prompts=(), rejected=())  # of this rank
        self.upcoming: Sequence[Sequence] = ()  # prompts of later steps, of each one, whose sampling begins now
        self.row: dict[str, float] = {}  # of metrics.jsonl
        self.is_best = False  # by train.keep_best, once it is recorded
        self._heartbeat = heartbeat
        self._started = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @property
    def updates(self) -> int:
        """Updates done after this step, by which its files are named."""
        return self.number + 1

    @property
    def prompts(self) -> Sequence:
        """Encoded rows of the step on this rank."""
        return self.batch.prompts

    @property
    def row_ids(self) -> list[str]:
        """Ids of the rows that this rank has in the step."""
        return [encoded.row.id for encoded in self.prompts]

    @contextmanager
    def phase(self, name: str, row_ids: Sequence[str] | None = None) -> Iterator[None]:
        """Time a phase of the step as `time/NAME`; a profile has it under its name. It is about all of the step's rows
        unless others are named."""
        self._heartbeat.begin(name, self.number, self.row_ids if row_ids is None else row_ids)
        started = time.perf_counter()
        with record_function(name):
            yield
        self._seconds[name] = self._seconds.get(name, 0.0) + _now() - started

    @contextmanager
    def untimed_phase(self, name: str) -> Iterator[None]:
        """Begin a phase that does not count into the step's seconds."""
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
    """Seconds, once the device has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
