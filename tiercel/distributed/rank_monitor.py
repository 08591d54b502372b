"""Watch the ranks of one machine from the launcher, for cases in which the ranks themselves cannot report.

A thread finds the processes of the ranks, writes the first sign of each before Python has started in it, records when
each ended, reports a stall if no rank can, and ends processes that are left after a stall, such as stopped ones.
"""

import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path

from tiercel.distributed.exit_diagnosis import RankExit
from tiercel.distributed.rank_status_files import SIGNS, final_faults, note_code, stack_file
from tiercel.errors import EXIT_STALL
from tiercel.messages import translated
from tiercel.processes import process_fields
from tiercel.reliability.redaction import redact
from tiercel.reliability.stall import RankStatus, stall_message
from tiercel.reliability.stall_files import RankStatusFiles, process_state

LOOK_SECONDS = 0.2
SECONDS_TO_SPEAK = 2.0  # the time that ranks have to report a stall before the launcher does
SECONDS_TO_END = 1.0  # the time that ranks have to end after the first one has, once a stall was reported
SECONDS_LOST = 3.0  # a longer time between two looks means that this process was suspended
LAUNCHER_PATIENCE = 29.0  # seconds; torch's launcher kills ranks that have not ended half a minute after its signal


class RankMonitor:
    """Watches the ranks while its context is open. `stall_timeout` is the number of seconds without a sign of any rank
    that count as a stall."""

    def __init__(self, notes: Path, world_size: int, stall_timeout: float):
        self.notes = notes
        self.stall_timeout = stall_timeout
        self.files = RankStatusFiles(notes / SIGNS, world_size)
        self._seen: set[int] = set()  # processes of all attempts
        self._attempt: set[int] = set()  # processes of the last attempt
        self._ends: dict[int, float] = {}  # by process, of all attempts: the time at which it was seen to have ended
        self._killed: set[int] = set()
        self._awake_since = 0.0  # end of a suspension of this process, in which the ranks may have been suspended too
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rank-monitor", daemon=True)

    def __enter__(self) -> "RankMonitor":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def exits(self, ended: Mapping[int, tuple[int, int]]) -> list[RankExit]:
        """Describe ranks that ended without a message. `ended` has, by rank, its process and its exit code. If a signal
        came that would come again, describe instead the ranks that got it, in any attempt."""
        ended = final_faults(self.notes) or ended
        first = min((self._ends[process] for process in self._attempt & self._ends.keys()), default=0.0)
        return [
            RankExit(rank=rank, code=code, was_ended=self._was_ended(process, code, first), stack=self._stack(process))
            for rank, (process, code) in sorted(ended.items())
        ]

    def _was_ended(self, process: int, code: int, first: float) -> bool:
        """Return whether the launcher ended a process. `first` is when the first rank ended."""
        if code == -signal.SIGKILL:
            return process in self._killed or self._ends.get(process, first) - first >= LAUNCHER_PATIENCE
        return code == -signal.SIGTERM

    def _stack(self, process: int) -> str:
        with suppress(OSError):
            return stack_file(self.notes, process).read_text(encoding="utf-8", errors="replace")
        return ""

    def _watch(self) -> None:
        looked = time.time()
        while not self._stopped.wait(LOOK_SECONDS):
            if time.time() - looked > SECONDS_LOST:
                self._awake_since = time.time()
            looked = time.time()
            with suppress(OSError):
                self._look()

    def _look(self) -> None:
        living = {process for process in self._attempt if is_running(process)}
        for process in self._attempt - living:
            self._ends.setdefault(process, time.monotonic())
        if not living or len(self._attempt) < self.files.world_size:
            new = {process: rank for process, rank in started_ranks().items() if process not in self._seen}
            self._attempt = (self._attempt if living else set()) | new.keys() if new else self._attempt
            for process, rank in new.items():
                self._begin(process, rank)
        elif self.files.announced_stall() is not None:
            first = min((self._ends[process] for process in self._attempt - living), default=time.monotonic())
            if time.monotonic() - first >= SECONDS_TO_END:
                self._kill(living)
        else:
            statuses = self._statuses()
            if len(statuses) == self.files.world_size and all(status.is_gone for status in statuses):
                self._speak(statuses)
                self._kill(living)

    def _begin(self, process: int, rank: int) -> None:
        """Write the first sign of a new rank, which is valid until the rank writes its own."""
        self._seen.add(process)
        before = self.files.read()[rank]
        if before is None or before.process != process:
            status = RankStatus(rank=rank, host=platform.node(), process=process, limit_seconds=self.stall_timeout)
            self.files.write(status)

    def _statuses(self) -> list[RankStatus]:
        """Read the statuses of the ranks that are watched. A rank counts as silent for the age of its file, minus the
        time that ranks have to report a stall themselves."""
        statuses = []
        for rank, status in enumerate(self.files.read()):
            since = max(self._awake_since, self.files.written_at(rank) or time.time())
            if status is not None:
                silence = time.time() - since - SECONDS_TO_SPEAK
                statuses.append(status.silent_for(silence, self.stall_timeout, process_state(status)))
        return statuses

    def _speak(self, statuses: Sequence[RankStatus]) -> None:
        self.files.announce_stall(statuses)
        note_code(EXIT_STALL)
        message = translated(redact(stall_message(statuses, {}, self.notes)))
        print(f"\n{message}", file=sys.stderr, flush=True)

    def _kill(self, processes: Set[int]) -> None:
        for process in processes:
            self._killed.add(process)
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def started_ranks() -> dict[int, int]:
    """Find the ranks among this process's children: rank by process id."""
    found: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            if int(process_fields(entry.name)[1]) == os.getpid():
                variables = (entry / "environ").read_bytes().split(b"\0")
                found |= {int(entry.name): int(each[5:]) for each in variables if each.startswith(b"RANK=")}
    return found


def is_running(process: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    return process_fields(process)[:1] not in ([], ["Z"])
