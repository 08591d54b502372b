"""Files by which ranks tell each other about a stall when collectives cannot: signals, a call, and stacks."""

import json
import os
import platform
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tiercel.processes import process_fields
from tiercel.regular_files import LARGEST_JSON, make_directory, open_new, read_json, read_text, write_new
from tiercel.reliability.redaction import redact_values
from tiercel.reliability.stall import RankStatus

CALL = "stalled"  # the file that a rank writes when it has detected a stall
NOWHERE = Path(os.devnull) / "signs"  # a path that cannot exist, for a rank that is alone


class RankStatusFiles:
    """One small file for each rank, always replaced as a whole, and one more that exists once a rank has reported a
    stall."""

    def __init__(self, directory: Path, world_size: int):
        self.directory = directory
        self.world_size = world_size

    def write(self, status: RankStatus) -> None:
        """Write a rank's status. If that fails, as on a full disk, the run continues: the file's time is updated so
        that the others see that the rank is alive."""
        file = self._file(status.rank)
        try:
            _replace(file, json.dumps(asdict(status)))
        except OSError:
            with suppress(OSError):
                os.utime(file)

    def read(self) -> list[RankStatus | None]:
        """Read the statuses by rank, with None for a rank that has none."""
        return [self._read(rank) for rank in range(self.world_size)]

    def written_at(self, rank: int) -> float | None:
        """Return when the rank last wrote, in seconds of the file system's clock, or None if it has no file."""
        with suppress(OSError):
            return self._file(rank).stat().st_mtime
        return None

    def changed_since(
        self, before: Sequence[RankStatus | None], *, now: float, began: float, limit: float
    ) -> list[RankStatus]:
        """Return the statuses by rank. A rank that wrote nothing new is silent, since its last status or since `began`.
        `now` and `began` are times of the file system's clock. `limit` is the number of seconds of silence that count
        as a stall."""
        statuses = []
        for rank, old in enumerate(before):
            new = self._read(rank)
            if new is not None and (old is None or new.looks != old.looks):
                statuses.append(new)
                continue
            since = max(began, self.written_at(rank) or began)
            last = new or RankStatus(rank=rank, limit_seconds=limit)
            statuses.append(last.silent_for(max(0.0, now - since), limit, process_state(last)))
        return statuses

    def have_stacks(self, statuses: Sequence[RankStatus]) -> bool:
        """Return whether all ranks that can write have written their stacks."""
        return all(status.is_silent or ((new := self._read(status.rank)) and new.has_stacks) for status in statuses)

    def announce_stall(self, statuses: Sequence[RankStatus]) -> Sequence[RankStatus]:
        """Tell all ranks that the run has stalled, with the statuses that show it. Returns the statuses that all
        ranks use: those of the first rank that called out."""
        draft = self.directory / f"{CALL}.{os.getpid()}.tmp"
        with suppress(OSError):
            write_new(draft, json.dumps(list(map(asdict, statuses))))
            with suppress(FileExistsError):
                os.link(draft, self._call)  # unlike a rename, it fails if the file exists
            draft.unlink()
        return self.announced_stall() or statuses

    def announced_stall(self) -> Sequence[RankStatus] | None:
        """Return the statuses of the rank that called out, or None if none has."""
        with suppress(OSError, ValueError, TypeError, LookupError, AttributeError):
            return [_status(fields) for fields in read_json(self._call)]
        return None

    def forget(self, rank: int) -> None:
        """Remove a rank's status and the call, before the rank's first status and after its last."""
        for file in (self._file(rank), self._call):
            with suppress(OSError):
                file.unlink()

    def leave(self, rank: int) -> None:
        """Remove a rank's files when it ends. The last rank of a run that never started removes the directory as
        well."""
        self.forget(rank)
        with suppress(OSError):
            self.directory.rmdir()
            self.directory.parent.rmdir()

    @property
    def _call(self) -> Path:
        return self.directory / CALL

    def _file(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.json"

    def _read(self, rank: int) -> RankStatus | None:
        with suppress(OSError, ValueError, TypeError, LookupError, AttributeError):
            return _status(read_json(self._file(rank)))
        return None


def _status(fields: dict[str, Any]) -> RankStatus:
    path = tuple((file, line) for file, line in fields["path"])
    return RankStatus(**{**fields, "rows": tuple(fields["rows"]), "path": path})


def write_status(file: Path, status: RankStatus) -> None:
    """Write a status to a file of the run directory, for people. If that fails, the run continues."""
    with suppress(OSError):
        _replace(file, json.dumps(redact_values(asdict(status))))


def _replace(file: Path, text: str) -> None:
    temporary = file.with_suffix(".tmp")
    make_directory(file.parent)
    write_new(temporary, text)
    temporary.replace(file)


def process_state(status: RankStatus) -> str:
    """Return the state of the process that gave a signal, as /proc's letter, or an empty string if the process is on
    another machine or the state is unknown."""
    if status.host != platform.node() or not status.process:
        return ""
    ended = ["Z"] if Path("/proc/self").exists() else [""]
    return (process_fields(status.process) or ended)[0]


def stack_name(rank: int) -> str:
    return f"rank-{rank}.txt"


def write_stacks(directory: Path, rank: int) -> None:
    """Write the Python stacks of all threads of this process in faulthandler's format, without its limit of 100
    threads. The main thread comes last, and each stack starts at its innermost frame."""
    make_directory(directory)
    main, stacks = threading.main_thread().ident, sys._current_frames()
    with open_new(directory / stack_name(rank)) as file:
        for thread in sorted(stacks, key=lambda thread: thread == main):
            file.write(f"Thread {thread:#018x} (most recent call first):\n")
            for frame, line in traceback.walk_stack(stacks[thread]):
                file.write(f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}\n')
            file.write("\n")


def read_stack(directory: Path, rank: int) -> str:
    """Return what `write_stacks` wrote, or an empty string if it wrote nothing."""
    with suppress(OSError):
        return read_text(directory / stack_name(rank), LARGEST_JSON)
    return ""
