"""The hold on a run directory: one process at a time writes it, and two things show which.

The first is a lock on .lock. The second is pulse/writer.json, which says who writes and changes every two seconds. It
is visible on other hosts and file systems, whose locks are not, and it survives `rm .lock`. Each save checks both.
"""

import fcntl
import json
import os
import platform
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from tiercel.errors import RunError, TakenError
from tiercel.processes import boot_id, process_fields
from tiercel.regular_files import read_regular
from tiercel.reliability.heartbeat import HEARTBEATS
from tiercel.runs.ending import FILE as END
from tiercel.runs.ending import LOCK, NO_LOCKS
from tiercel.writing import GO_ON, writing

WRITER = "writer.json"  # in PULSES
LOCK_PATIENCE_SECONDS = 5.0
BEAT_SECONDS = 2.0
SILENT_SECONDS = 30.0  # without a heartbeat; after that, a writer on another machine counts as gone
LARGEST_WRITER = 1 << 12  # bytes
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, kw_only=True, slots=True)
class Writer:
    """A process that writes a run, and how many heartbeats it has written."""

    id: str
    host: str
    process: int
    machine: str  # identifies the boot and the container, within which a process number is unique
    began: str  # start of the process in the system's clock, because process numbers are reused
    directory: int  # the inode of the run's directory, which differs in a copy
    beats: int = 0

    @property
    def name(self) -> str:
        return f"process {self.process} on {self.host}"


class Hold:
    """A process's hold on a run directory, from `take` to `close`."""

    def __init__(self, path: Path):
        self._path = path
        self._file = path / HEARTBEATS / WRITER
        self._lock = -1
        self._has_locks = True
        self._other: Writer | None = None  # the writer that has taken over the directory
        self._own = Writer(
            id=secrets.token_hex(8),
            host=platform.node(),
            process=os.getpid(),
            machine=_machine(),
            began=_began(os.getpid()),
            directory=path.stat().st_ino,
        )
        self._closed = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="tiercel-hold", daemon=True)

    def take(self) -> bool:
        """Take the directory, and return whether its file system has locks. Raises RunError if another process has it,
        and OSError."""
        self._lock_file()
        self._require_none_alive()
        (self._path / HEARTBEATS).mkdir(exist_ok=True)
        self._show()
        self._beating.start()
        return self._has_locks

    def require(self) -> None:
        """Raise TakenError if another process has taken over the directory, and RunError if the lock is gone and cannot
        be taken again."""
        self._require_own()
        with writing(self._path / LOCK, GO_ON):
            if self._has_locks and self._is_same_file():
                return
        if self._has_locks:
            # Somebody removed .lock or replaced it. A newcomer may hold the new one until it notices that this process
            # is alive.
            self._unlock()
            with writing(self._path / LOCK, GO_ON):
                self._lock_file()
            self._require_own()
        if (self._path / END).exists():  # left by another process that has ended in the meantime
            raise self._taken("another process")

    def close(self) -> None:
        """Release the directory."""
        self._closed.set()
        if self._beating.is_alive():
            self._beating.join()
        with suppress(OSError):
            if (found := self._found()) is not None and found.id == self._own.id:
                self._file.unlink()
            self._file.parent.rmdir()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def _lock_file(self) -> None:
        """Open .lock and lock it. The workers of a run that was just killed hold the lock until they end, so this waits
        a little."""
        deadline = time.monotonic() + LOCK_PATIENCE_SECONDS
        while True:
            self._lock = os.open(self._path / LOCK, _FLAGS, 0o666)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise self._refused() from error
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                self._has_locks = False
                return
            else:
                if self._is_same_file():
                    return
            self._unlock()
            time.sleep(0.1)

    def _is_same_file(self) -> bool:
        own = os.fstat(self._lock)
        try:
            now = os.stat(self._path / LOCK, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return (now.st_dev, now.st_ino) == (own.st_dev, own.st_ino)

    def _refused(self) -> Exception:
        """Return the error for a process that cannot have the directory, because it never had it or because another has
        it now."""
        found = self._found()
        if self._beating.ident is not None:
            return self._taken("another process" if found is None else found.name)
        return RunError(f"output: another process is writing {self._path}; wait for it or name another directory")

    def _taken(self, other: str) -> TakenError:
        return TakenError(
            f"output: {other} has taken over {self._path}, so this run ends here and writes nothing more to it; name "
            "another directory for one of the two"
        )

    def _require_own(self) -> None:
        if (other := self._seen_other()) is not None:
            raise self._taken(other.name)

    def _seen_other(self) -> Writer | None:
        if (found := self._found()) is not None and found.id != self._own.id:
            self._other = found
        return self._other

    def _require_none_alive(self) -> None:
        """Raise RunError while another process shows that it writes the directory. A process on this machine is looked
        up; one on another machine is watched until it has been silent for long enough."""
        found = first = self._found()
        if found is None or found.directory != self._own.directory:
            return
        refusal = RunError(f"output: {found.name} is writing {self._path}; wait for it or name another directory")
        if found.machine and found.machine == self._own.machine:
            if _began(found.process) == found.began:
                raise refusal
            return
        deadline = time.monotonic() + SILENT_SECONDS - self._silent_seconds()
        while time.monotonic() < deadline:
            time.sleep(min(0.5, BEAT_SECONDS / 2))
            if (found := self._found()) is None:
                return  # it has ended
            if found != first:
                raise refusal

    def _silent_seconds(self) -> float:
        """Return the time since the last heartbeat, with both times from the file system's clock."""
        os.utime(self._lock)
        with suppress(OSError):
            return max(0.0, os.fstat(self._lock).st_mtime - self._file.stat().st_mtime)
        return 0.0

    def _found(self) -> Writer | None:
        """Return the writer of the directory, or None if none is recorded."""
        try:
            found = Writer(**json.loads(read_regular(self._file, LARGEST_WRITER)))
            return found if isinstance(found.process, int) else None
        except (OSError, ValueError, TypeError, RecursionError):
            return None

    def _show(self, beats: int = 0) -> None:
        """Write who writes the directory, in place: other hosts see a change soonest if the file stays the same
        file."""
        text = json.dumps({**asdict(self._own), "beats": beats}).encode()
        descriptor = os.open(self._file, _FLAGS, 0o666)
        try:
            os.pwrite(descriptor, text, 0)
            os.ftruncate(descriptor, len(text))
        finally:
            os.close(descriptor)

    def _beat(self) -> None:
        """Write a heartbeat every two seconds until another process has taken over the directory. A disk that is full
        or gone for a while does not end this."""
        beats = 0
        while not self._closed.wait(BEAT_SECONDS):
            with suppress(OSError):
                if self._seen_other() is not None:
                    return
                self._file.parent.mkdir(exist_ok=True)
                self._show(beats := beats + 1)


def _machine() -> str:
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _began(process: int) -> str:
    """Return the start time of a process on this machine, or an empty string if it has ended or the system does not
    tell."""
    fields = process_fields(process)
    return fields[19] if fields and fields[0] not in ("Z", "X") else ""
