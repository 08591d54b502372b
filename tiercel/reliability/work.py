"""Whether a process works at all, for phases that report no progress, such as imports."""

import os
import resource
import sys
import time
from dataclasses import dataclass

from tiercel.processes import process_fields

LEAST_SHARE = 0.02  # of a core; threads that only check something now and then use less
SHORTEST_SPAN = 0.02  # seconds; the figures of a shorter time mean nothing
LEAST_READS = 8.0  # per second; fewer are pages of an idle process that the system had swapped out
OWN_THREAD = getattr(resource, "RUSAGE_THREAD", None)  # only Linux has it


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceUse:
    """The resources that all threads except the calling one have used so far."""

    processor_seconds: float
    input_output: int  # pages and blocks read from a disk or network, blocks written
    modules: int  # imported

    @classmethod
    def now(cls) -> "ResourceUse":
        every = resource.getrusage(resource.RUSAGE_SELF)
        counted = [(every, 1)] if OWN_THREAD is None else [(every, 1), (resource.getrusage(OWN_THREAD), -1)]
        return cls(
            processor_seconds=sum(sign * (usage.ru_utime + usage.ru_stime) for usage, sign in counted),
            input_output=sum(sign * (usage.ru_majflt + usage.ru_inblock + usage.ru_oublock) for usage, sign in counted),
            modules=len(sys.modules),
        )


def process_age() -> float:
    """Return the seconds since this process was started, or 0 if that cannot be read."""
    if not (fields := process_fields("self")):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


class WorkMonitor:
    """Tells whether the process works. The same thread must always ask. Only activity in two successive looks counts as
    work, because a hanging process also reads or computes for a moment."""

    def __init__(self) -> None:
        self._used = ResourceUse.now()
        self._reads = self._computes = False  # at the last look
        # `progress` is the time of the last import or reading.
        self._looked = self.last_work_at = self.progress = time.monotonic()

    def idle_seconds(self) -> float:
        """Return the seconds since the process last worked."""
        now = time.monotonic()
        seconds = now - self._looked
        if seconds < SHORTEST_SPAN:
            return now - self.last_work_at
        used, before = ResourceUse.now(), self._used
        reads = used.input_output - before.input_output > LEAST_READS * seconds
        computes = reads or used.processor_seconds - before.processor_seconds > LEAST_SHARE * seconds
        if used.modules > before.modules or (reads and self._reads):
            self.last_work_at = self.progress = now
        elif computes and self._computes:
            self.last_work_at = now
        self._used, self._looked, self._reads, self._computes = used, now, reads, computes
        return now - self.last_work_at
