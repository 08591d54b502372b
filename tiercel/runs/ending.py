"""How the last process of a run ended: the file end.json, which `tiercel runs` reads. Imports no torch."""

import errno
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from tiercel.errors import EXIT_DONE, EXIT_STALL, EXIT_TERMINATED, TakenError, TiercelError
from tiercel.processes import launched_rank
from tiercel.regular_files import read_text
from tiercel.reliability.heartbeat import HEARTBEATS
from tiercel.reliability.redaction import redact
from tiercel.runs.files import write_atomically
from tiercel.writing import GO_ON, writing

FILE, LOCK = "end.json", ".lock"
LARGEST_MESSAGE = 1 << 20  # bytes
SILENT_SECONDS = 15.0  # without a heartbeat of a rank; one is written every two seconds
NO_LOCKS = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS)  # errors of a file system without locks
EXIT_BUG = 1  # Python's own code, after an error that nobody foresaw
State = Literal["running", "done", "stopped", "stalled", "failed", "killed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunEnding:
    """The state of a run and what stopped it."""

    state: State
    reason: str = ""  # empty for a run that is running or done


@contextmanager
def recorded_ending(run: Path) -> Iterator[None]:
    """Record in `run` how the block ended. A process that is killed records nothing."""
    with writing(run / FILE, GO_ON):
        (run / FILE).unlink(missing_ok=True)
    try:
        yield
    except TakenError:
        raise  # the other process records how its run ends
    except BaseException as error:
        with suppress(OSError):  # such as on a full disk: the original error says more
            if isinstance(error, TiercelError):
                _write(run, error.exit_code, str(error))
            else:
                _write(run, EXIT_BUG, f"{type(error).__name__}: {error}")
        raise
    with writing(run / FILE, GO_ON):
        _write(run, EXIT_DONE, "")


def _write(run: Path, code: int, text: str) -> None:
    write_atomically(run / FILE, json.dumps({"exit_code": code, "reason": redact(text)}))


def ending_of(run: Path) -> RunEnding:
    """Return the state of a run directory. Raises OSError if it cannot be read."""
    if is_held(run / LOCK) or _has_fresh_sign(run):
        return RunEnding(state="running")
    silent = "its process ended without recording a reason: it was killed, or the machine went down"
    if os.path.lexists(run / FILE):
        silent = f"{FILE} does not say how its process ended: it was killed, or something else wrote the file"
        with suppress(ValueError, LookupError, TypeError, RecursionError):
            end = json.loads(read_text(run / FILE, LARGEST_MESSAGE))
            return RunEnding(state=_state(end["exit_code"]), reason=str(end["reason"]))
    messages = sorted((run / "stall").glob("step-*/message.txt"), key=lambda file: file.lstat().st_mtime)
    lock = run / LOCK
    if messages and (not lock.exists() or messages[-1].lstat().st_mtime >= lock.stat().st_mtime):
        return RunEnding(state="stalled", reason=read_text(messages[-1], LARGEST_MESSAGE))
    return RunEnding(state="killed", reason=silent)


def _has_fresh_sign(run: Path) -> bool:
    """Return whether a rank has just written its heartbeat, which is visible on other machines even if locks are
    not."""
    times = [file.lstat().st_mtime for file in (run / HEARTBEATS).glob("rank-*.json")]
    return bool(times) and time.time() - max(times) < SILENT_SECONDS


def _state(code: int) -> State:
    known: dict[int, State] = {EXIT_DONE: "done", EXIT_TERMINATED: "stopped", EXIT_STALL: "stalled"}
    return known.get(code, "failed")


def is_held(lock: Path) -> bool:
    """Return whether a process holds the lock of a run."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:  # without locks, the ranks' heartbeats answer the question
        if error.errno not in NO_LOCKS:
            raise
    finally:
        os.close(descriptor)
    return False


SAME_STOP_SECONDS = 0.5  # signals so close to each other are one request
# SIGTERM from the scheduler and from the launcher: the second is handled only when a long call of torch has returned.
SAME_STOP_OF_A_RANK = 20.0


class StopRequest:
    """A request to stop, set by the first signal. A context manager that restores the earlier handlers when it exits. A
    second signal has its default effect, unless it comes with the first: a stop of a whole group of processes reaches a
    rank directly and through its launcher. A rank takes a second SIGTERM only SAME_STOP_OF_A_RANK after the first."""

    def __init__(self) -> None:
        self.is_set = False
        self._asked_at = 0.0  # by the monotonic clock
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        is_main = threading.current_thread() is threading.main_thread()  # only it may set handlers
        for number in (signal.SIGTERM, signal.SIGINT) if is_main else ():
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_rank = number == signal.SIGTERM and launched_rank() is not None
        if self.is_set and now - self._asked_at > (SAME_STOP_OF_A_RANK if is_rank else SAME_STOP_SECONDS):
            is_session = hasattr(sys, "ps1") or "ipykernel" in sys.modules  # whose process must not be ended
            if is_session and number == signal.SIGINT:
                raise KeyboardInterrupt
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if not self.is_set:
            self.is_set, self._asked_at = True, now
