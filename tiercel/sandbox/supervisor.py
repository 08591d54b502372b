"""The process between the trainer and a worker: it runs no code of the user's, so it outlives what that does.

As the subreaper (Linux) of all that the worker starts it inherits every process that left the worker's session or
lost its parent, so none can hide. The worker itself could not do this, because it may end first. Where the user's code
kills the supervisor, the trainer ends what is left, which it knows by a mark that `env -i` does not take away
(`marked`); where it stops it, the trainer's word, or its death, wakes it. Other systems than Linux have neither:
there a process in a session of its own is left. Started by process.py; imports no torch.

The memory that all of them hold is added up. RLIMIT_AS and RLIMIT_DATA hold for each process by itself, and count what
was reserved and never touched: the address space of CUDA, the stacks of idle threads.
"""

import contextlib
import ctypes
import importlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from tiercel.reliability.privacy import give_up_reading_others

TICK = 0.1  # seconds between looks at the memory; what is allocated meanwhile is the most by which it can be exceeded
CLEAN = 0  # exit code: nothing is left
UNCLEAN = 1

_END_WAIT = 5.0  # seconds for killed processes to end, even while they fork
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisorTask:
    """What a supervisor is to start and to watch; travels as JSON."""

    entry: str  # package.module:function, which gets the worker's socket, `work` and `file_mb`
    work: Any  # plain JSON data
    channel: int  # descriptor of the worker's socket
    control: int  # descriptor of the supervisor's own
    trainer: int  # process id
    directory: str  # the worker's TMPDIR, removed at the end
    memory_gb: float
    file_mb: float
    mark: int  # see `mark_descendants`


def main(charge_json: str) -> NoReturn:
    """Start the worker, watch it, end all that it started; then say on the control socket why it ended, if it did."""
    charge = SupervisorTask(**json.loads(charge_json))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)  # the user's code may have stopped this process
    worker = os.fork()
    if worker == 0:
        _work(charge)
    os.close(charge.channel)
    _leave_output_to_the_worker()
    with socket.socket(fileno=charge.control) as control:
        try:
            reason = watch(worker, control, charge)
        except Exception:
            reason = f"the process that watches over it failed:\n{traceback.format_exc()}"
        signal.set_wakeup_fd(-1)
        code = CLEAN if end_all(worker) else UNCLEAN
        if reason is not None:
            with contextlib.suppress(OSError):  # the trainer may be gone
                control.sendall(reason.encode())
        shutil.rmtree(charge.directory, ignore_errors=True)
    os._exit(code)


def _leave_output_to_the_worker() -> None:
    """Leave standard output to the worker: a pipe that it has filled would block every other writer."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _work(charge: SupervisorTask) -> NoReturn:
    """Run the worker's side of the fork, in a session of its own."""
    os.setsid()
    os.close(charge.control)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    mark_descendants(charge.mark)
    give_up_reading_others()
    code = 1
    try:
        module, _, name = charge.entry.partition(":")
        getattr(importlib.import_module(module), name)(charge.channel, charge.work, charge.file_mb)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # by no way may it go on as a second supervisor


def watch(worker: int, control: socket.socket, charge: SupervisorTask) -> str | None:
    """Wait for an end and say why it came; None where the trainer wants it, or is gone.

    The trainer closes the control socket to end all, and sends a byte to be shown where the worker is.
    """
    woken = _woken_by_ending_children()
    limit = charge.memory_gb * 1e9
    while True:
        ready, _, _ = select.select([control, woken], [], [], TICK)
        if woken in ready:
            woken.recv(4096)
        if control in ready and not _received(control):
            return None
        if control in ready:
            os.kill(worker, signal.SIGUSR1)
        if os.getppid() != charge.trainer:
            return None
        status, _ = reap(worker)
        if status is not None:
            return describe_end(os.waitstatus_to_exitcode(status), charge.file_mb)
        held = held_bytes(descendants(os.getpid()), limit)
        if held > limit:
            return (
                f"it and the processes it started used {held / 1000000000.0:.2f} GB of memory, more than "
                f"reliability.reward_memory_gb = {charge.memory_gb:g} allows; its process was killed"
            )


def _woken_by_ending_children() -> socket.socket:
    """Make a socket that can be read when a child has ended."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # a handler there must be, or nothing is written
    signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)
    return reading


def _received(control: socket.socket) -> bytes:
    try:
        return control.recv(1)
    except ConnectionError:
        return b""


def reap(worker: int) -> tuple[int | None, bool]:
    """Collect every child that has ended. Return the worker's wait status, where it is one of them, and whether others
    are left."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found, False
        if pid == 0:
            return found, True
        if pid == worker:
            found = status


def end_all(worker: int) -> bool:
    """Kill the worker's group and all descendants, and wait; False where some are left after a while."""
    deadline = time.monotonic() + _END_WAIT
    while True:
        for kill, pid in [(os.killpg, worker), *((os.kill, pid) for pid in descendants(os.getpid()))]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(pid, signal.SIGKILL)
        _, has_children = reap(worker)
        if not has_children:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)


def descendants(pid: int) -> set[int]:
    """List the ids of all processes below one; none where there is no /proc."""
    found: set[int] = set()
    unseen = [pid]
    while unseen:
        tasks = f"/proc/{unseen.pop()}/task"
        with contextlib.suppress(OSError):  # it has ended
            for thread in os.listdir(tasks):
                with contextlib.suppress(OSError), open(f"{tasks}/{thread}/children", "rb", buffering=0) as children:
                    new = {int(child) for child in children.read().split()} - found
                    found |= new
                    unseen += new
    return found


def held_bytes(pids: Iterable[int], enough: float) -> int:
    """Add up the memory of processes without the pages of files, in bytes; exact where the quick sum is more than
    `enough`.

    The quick sum counts a page that several processes share once for each.
    """
    pids = tuple(pids)
    quick = sum(_kibibytes(f"/proc/{pid}/status", (b"RssAnon:", b"RssShmem:")) for pid in pids) * 1024
    if quick <= enough:
        return quick
    exact = sum(_kibibytes(f"/proc/{pid}/smaps_rollup", (b"Pss_Anon:", b"Pss_Shmem:")) for pid in pids) * 1024
    return exact or quick  # older kernels do not tell


def _kibibytes(file: str, fields: tuple[bytes, ...]) -> int:
    """Add up some fields of a file of /proc; 0 where the process has ended."""
    try:
        with open(file, "rb") as lines:
            return sum(int(line.split()[1]) for line in lines if line.startswith(fields))
    except OSError:
        return 0


def mark_descendants(mark: int) -> None:
    """Give this process, and all its descendants, a mark that outlasts fork, exec and an empty environment: a limit, in
    microseconds, of the time that real-time processes may take, so high that none is ever hit. Linux only."""
    if sys.platform == "linux":
        with contextlib.suppress(ValueError, OSError):  # the limit here is lower already
            resource.setrlimit(resource.RLIMIT_RTTIME, (mark, mark))


def marked(mark: int, variable: str) -> Iterator[int]:
    """List the ids of the processes with the mark, and of those that were started with `NAME=value` in their
    environment; the newest first, because one that forks and ends is soon another."""
    wanted = (("limits", str(mark).encode()), ("environ", variable.encode()))
    for pid in sorted((int(name) for name in os.listdir("/proc") if name.isdecimal()), reverse=True):
        for file, text in wanted:
            with contextlib.suppress(OSError), open(f"/proc/{pid}/{file}", "rb") as content:  # gone, or another user's
                if text in content.read():
                    yield pid
                    break


def describe_end(code: int, file_mb: float) -> str:
    """Write an exit code, or a signal's number as a negative one, in words."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    ended = f"its process was killed by {name}"
    return f"{ended}; {file_limit(file_mb)}" if name == "SIGXFSZ" else ended


def _prctl(option: int, argument: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, *(ctypes.c_ulong(number) for number in (argument, 0, 0, 0)))


def file_limit(file_mb: float) -> str:
    """Write what to say of a file that grew too large."""
    return f"reliability.reward_file_mb = {file_mb:g} limits every file that your code writes"
