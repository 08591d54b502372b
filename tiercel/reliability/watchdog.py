"""A watchdog that ends a run without progress, with the stacks of all ranks and a message that names the rank at fault.

From the start of its process, each rank has a thread. It writes what the rank is doing to a file that all ranks see,
and checks whether the rank makes progress and whether the next rank still writes. A rank that waits for the others is
not at fault as long as one of them makes progress. The rank that detects a stall announces it, with the statuses that
show it. Then all ranks write their stacks and exit; the first rank that still can prints the message.
"""

import faulthandler
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tiercel.errors import EXIT_STALL
from tiercel.messages import translated
from tiercel.regular_files import LARGEST_JSON, open_to_append, read_text, write_new
from tiercel.reliability.heartbeat import Heartbeat
from tiercel.reliability.redaction import redact, redact_values
from tiercel.reliability.stall import RankStatus, code_path, is_inside_torch, is_stalled, stall_message, waiting_place
from tiercel.reliability.stall_files import RankStatusFiles, read_stack, stack_name, write_stacks, write_status
from tiercel.reliability.work import WorkMonitor

SLOWEST_LOOK = 0.5  # seconds
LOOKS_PER_LIMIT = 20
LOOKS_BETWEEN_STATUSES = 2  # a rank whose status does not change for this number of looks is silent
LONGEST_SILENCE = 3.0  # seconds
RANKS_OF_A_LOOK = 128  # with more ranks, each looks less often, because all write to one file system
SECONDS_BETWEEN_PULSES = 2.0  # between updates of the file in the run directory, for people
SECONDS_FOR_STACKS = 2.0
SECONDS_FOR_THE_MESSAGE = 4.0
SECONDS_OF_CLOCKS = 10.0  # the clocks of two machines may differ by this much
STDERR = 2
ANY_PHASE = ""
SHOWN_BY_WORK = ("import", "agree", "rows", "load", "report")  # phases whose own limit applies only while they work


@dataclass(eq=False)
class Watchdog:
    """Watches the rank that opens it; a context manager.

    `directory` is the run's, and `files` has the ranks' statuses. `limits` gives the seconds without progress for each
    phase, and under ANY_PHASE for all other phases. `age` is the number of seconds since the process started, during
    which other ranks may have been silent. `end` gets the exit code and does not return.
    """

    heartbeat: Heartbeat
    directory: Path
    files: RankStatusFiles
    limits: Mapping[str, float]
    age: float = field(default=0.0, kw_only=True)
    end: Callable[[int], None] = field(default=os._exit, kw_only=True)

    def __post_init__(self) -> None:
        look = min(SLOWEST_LOOK, min(self.limits.values()) / LOOKS_PER_LIMIT)
        self.look_seconds = look * max(1.0, self.files.world_size / RANKS_OF_A_LOOK)
        self._looks_between_pulses = max(1, round(SECONDS_BETWEEN_PULSES / self.look_seconds))
        self._next_rank = (self.heartbeat.rank + 1) % self.files.world_size
        self._has_met_next = False
        self._began = 0.0  # when this process started or was resumed, by the file system's clock
        self._work = WorkMonitor()
        self._main = threading.get_ident()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._looks = 0
        self._has_stacks = False

    def __enter__(self) -> "Watchdog":
        self.heartbeat.beat()
        self.files.forget(self.heartbeat.rank)
        self._look()  # before anything can block the interpreter
        self._began = self._now() - self.age
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        self.files.leave(self.heartbeat.rank)

    def limit(self, phase: str) -> float:
        """Return the seconds that a phase may take without progress."""
        return self.limits.get(phase, self.limits[ANY_PHASE])

    def _watch(self) -> None:
        try:
            while not self._sleep():
                with suppress(OSError, RuntimeError):  # the file system fails for a while, or no thread can start
                    self._arm()
                    self._judge()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _sleep(self) -> bool:
        """Sleep until the next look, and return whether the watchdog was closed. Time that the process lost because
        Ctrl-Z or a scheduler stopped it does not count as time without progress."""
        started = time.monotonic()
        is_over = self._stopped.wait(self.look_seconds)
        lost = time.monotonic() - started - self.look_seconds
        if lost > max(self.look_seconds, min(LONGEST_SILENCE, self.limits[ANY_PHASE] / 8)):
            self.heartbeat.last_progress_at = min(self.heartbeat.last_progress_at + lost, time.monotonic())
            self._work.last_work_at = min(self._work.last_work_at + lost, time.monotonic())
            self._work.progress = min(self._work.progress + lost, time.monotonic())
        if lost > LONGEST_SILENCE:  # perhaps all ranks were suspended and resume one after the other
            self._began = self._now() + lost
        return is_over

    def _judge(self) -> None:
        own = self._look()
        called = self.files.announced_stall()
        if called is None and (own.is_over or self._next_is_silent()):
            statuses = self._statuses_of_all()
            if is_stalled(own.rank, statuses) and not self._stopped.is_set():
                called = self.files.announce_stall(statuses)
        if called is not None:
            self._end(called)

    def _next_is_silent(self) -> bool:
        """Return whether the next rank has written nothing for longer than any phase allows. A rank whose file existed
        and is gone has ended by itself. Each rank watches only one other, so the cost does not grow with their
        number."""
        if self._next_rank == self.heartbeat.rank:
            return False
        written_at = self.files.written_at(self._next_rank)
        self._has_met_next |= written_at is not None
        if written_at is None and self._has_met_next:
            return False
        return self._now() - max(self._began, written_at or self._began) >= self.limits[ANY_PHASE]

    def _now(self) -> float:
        """Return the file system's time, just after this rank wrote its status, because the clocks of machines
        differ."""
        return self.files.written_at(self.heartbeat.rank) or time.time()

    def _arm(self) -> None:
        """Let faulthandler write the stacks to stderr if even this thread cannot run because something blocks the
        interpreter. The process continues, because one that a scheduler stopped looks the same; other ranks end it."""
        longest = self.limit(self.heartbeat.activity.phase) + SECONDS_FOR_STACKS + SECONDS_FOR_THE_MESSAGE
        faulthandler.dump_traceback_later(longest, file=STDERR)

    def _look(self) -> RankStatus:
        """Return what this rank is doing, and write it for the others."""
        self._looks += 1
        doing = self.heartbeat.activity
        frame = sys._current_frames().get(self._main)
        waits_in, path = doing.collective or waiting_place(frame), code_path(frame)
        is_inside = is_inside_torch(frame)
        del frame  # the frame would keep the local variables of its functions alive
        quiet, limit = self._quiet_and_limit(doing.phase)
        status = RankStatus(
            rank=self.heartbeat.rank,
            host=platform.node(),
            process=os.getpid(),
            phase=doing.phase,
            phases=doing.phases,
            step=doing.step,
            rows=doing.rows[:8],
            waits_in=waits_in,
            path=path,
            quiet_seconds=quiet,
            limit_seconds=limit,
            is_inside=is_inside,
            looks=self._looks,
            has_stacks=self._has_stacks,
        )
        self.files.write(status)
        if (file := self.heartbeat.file) is not None and self._looks % self._looks_between_pulses == 0:
            write_status(file, status)
            if self.heartbeat.file is None:  # the run was closed meanwhile
                file.unlink(missing_ok=True)
        return status

    def _quiet_and_limit(self, phase: str) -> tuple[float, float]:
        """Return the seconds without progress and the limit. In a phase that reports no progress, imports and reading
        count as progress, and the phase's own limit applies for as long as the process works at all."""
        if self.heartbeat.is_away:
            self.heartbeat.beat()
        quiet, idle = self.heartbeat.quiet_seconds, self._work.idle_seconds()
        if phase not in SHOWN_BY_WORK:
            return quiet, self.limit(phase)
        if idle >= self.limits[ANY_PHASE]:
            return min(quiet, idle), self.limits[ANY_PHASE]
        return min(quiet, time.monotonic() - self._work.progress), self.limit(phase)

    def _statuses_of_all(self) -> list[RankStatus]:
        """Return the statuses by rank. A rank whose status does not change meanwhile is silent."""
        before, started = self.files.read(), time.monotonic()
        silence = max(LOOKS_BETWEEN_STATUSES * self.look_seconds, min(LONGEST_SILENCE, min(self.limits.values()) / 20))
        own = self._look()
        while time.monotonic() - started < silence:
            time.sleep(self.look_seconds)
            own = self._look()
        limit = self.limits[ANY_PHASE]
        statuses = self.files.changed_since(before, now=self._now(), began=self._began, limit=limit)
        statuses[own.rank] = own
        return statuses

    def _end(self, statuses: Sequence[RankStatus]) -> None:
        """Write the stacks, print one message on one rank, and exit. A file that cannot be written must not prevent the
        rest."""
        started = time.time()
        stall = self.directory / "stall" / f"step-{self.heartbeat.activity.step:06d}"
        message_file = stall / "message.txt"
        try:
            with suppress(OSError):
                write_stacks(stall, self.heartbeat.rank)
            self._has_stacks = True
            self._look()
            if self.heartbeat.rank == next((status.rank for status in statuses if not status.is_silent), None):
                self._await(lambda: self.files.have_stacks(statuses), SECONDS_FOR_STACKS)
                self._speak(statuses, stall, message_file, started)
            else:
                self._await(lambda: _is_newer(message_file, started), SECONDS_FOR_THE_MESSAGE)
                if os.environ.get("LOCAL_RANK") == "0":  # a machine may show its user only the output of its own ranks
                    with suppress(OSError):
                        message = translated(read_text(message_file, LARGEST_JSON))
                        print(f"\n{message}", end="", file=sys.stderr, flush=True)
        finally:
            self._stopped.set()
            self.end(EXIT_STALL)

    def _speak(self, statuses: Sequence[RankStatus], stall: Path, message_file: Path, started: float) -> None:
        stacks = {
            status.rank: read_stack(stall, status.rank)
            for status in statuses
            if _is_newer(stall / stack_name(status.rank), started)  # not one of an earlier stall at this step
        }
        message = redact(stall_message(statuses, stacks, stall))
        print(f"\n{translated(message)}", file=sys.stderr, flush=True)  # files stay in English, for those who help
        with suppress(OSError):
            with open_to_append(self.directory / "log.txt") as log:
                log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}\n")
            write_new(stall / "signs.json", json.dumps(redact_values(list(map(asdict, statuses))), indent=1))
            write_new(message_file, message + "\n")

    def _await(self, is_there: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not is_there() and time.monotonic() < deadline:
            time.sleep(0.05)


def _is_newer(file: Path, since: float) -> bool:
    """Return whether a file is newer than a time of this machine's clock, with a margin because another machine may
    have written it."""
    return file.exists() and file.stat().st_mtime >= since - SECONDS_OF_CLOCKS
