"""Supervise a worker, in a process between the trainer and the worker that runs no user code, so that user code cannot
crash it.

As the subreaper (Linux) of everything that the worker starts, it inherits every process that left the worker's session
or lost its parent, so that none can hide. The worker itself could not do this, because it may end first. If the user's
code kills the supervisor, the trainer ends what is left, which it recognises by a mark that `env -i` does not remove
(`marked`); if the user's code stops it, the trainer's signal, or the trainer's death, wakes it. Systems other than
Linux have neither, so a process that began a session of its own is not killed there. Started by
process.py; imports no torch.

The memory of all these processes is added up. RLIMIT_AS and RLIMIT_DATA apply to each process by itself, and count what
was reserved but never touched: the address space of CUDA, the stacks of idle threads.
"""

import contextlib
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

from tiercel.processes import signal_name
from tiercel.reliability.privacy import give_up_reading_others, prctl

TICK = 0.1  # seconds between checks of the memory; the limit can be exceeded by what is allocated in that time
CLEAN = 0  # exit code: nothing is left
UNCLEAN = 1
STOPS = (signal.SIGTERM, signal.SIGINT)

_END_WAIT = 5.0  # seconds that killed processes get to end, even if they keep forking
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisorTask:
    """What a supervisor should start and watch; passed as JSON."""

    entry: str  # package.module:function, which is called with the worker's socket, `work` and `file_mb`
    work: Any  # plain JSON data
    channel: int  # descriptor of the worker's socket
    control: int  # descriptor of the supervisor's own socket
    trainer: int  # process id
    directory: str  # the worker's TMPDIR, removed at the end
    memory_gb: float
    file_mb: float
    mark: int  # see `mark_descendants`


def main(charge_json: str) -> NoReturn:
    """Start the worker, watch it, and end everything that it started; then report on the control socket why the worker
    ended, if it did."""
    charge = SupervisorTask(**json.loads(charge_json))
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)  # the user's code may have stopped this process
    # A scheduler's SIGTERM goes to all processes of a job; the trainer decides when these end.
    for number in STOPS:
        signal.signal(number, lambda number, frame: None)
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
            with contextlib.suppress(OSError):  # the trainer may no longer exist
                control.sendall(reason.encode())
        shutil.rmtree(charge.directory, ignore_errors=True)
    os._exit(code)


def _leave_output_to_the_worker() -> None:
    """Leave standard output to the worker: once the worker has filled the pipe, every other writer would block."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _stops_end_forks() -> None:
    """Let the processes that the user's code forks be ended by SIGTERM, as multiprocessing does. The signal is held
    back until it has its default handler again."""

    def begin() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))

    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,)),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,)),
        after_in_child=begin,
    )


def _work(charge: SupervisorTask) -> NoReturn:
    """Run the worker's side of the fork, in its own session."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the user's code may interrupt itself
    _stops_end_forks()
    os.close(charge.control)
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
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
        os._exit(code)  # in no case may it continue as a second supervisor


def watch(worker: int, control: socket.socket, charge: SupervisorTask) -> str | None:
    """Wait for an end and return its reason; None if the trainer asks for it, or no longer exists.

    The trainer closes the control socket to end everything, and sends a byte to be shown where the worker is.
    """
    woken = _woken_by_ending_children()
    limit = charge.memory_gb * 1e9
    waiting = select.poll()  # select refuses descriptors above 1,023, and the control socket keeps the trainer's number
    for each in (control, woken):
        waiting.register(each, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in waiting.poll(TICK * 1000)}
        if woken.fileno() in ready:
            woken.recv(4096)
        if control.fileno() in ready and not _received(control):
            return None
        if control.fileno() in ready:
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
    """Make a socket that becomes readable when a child has ended."""
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # there must be a handler, or nothing is written
    signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)
    return reading


def _received(control: socket.socket) -> bytes:
    try:
        return control.recv(1)
    except ConnectionError:
        return b""


def reap(worker: int) -> tuple[int | None, bool]:
    """Collect every child that has ended. Return the worker's wait status, if the worker is one of them, and whether
    other children are left."""
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
    """Kill the worker's group and all descendants, and wait; return False if some are left after a while."""
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
    """List the ids of all processes below one; empty if there is no /proc."""
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
    """Add up the memory of processes without the pages of files, in bytes. The result is exact if the quick sum is more
    than `enough`.

    The quick sum counts a page that several processes share once for each of them.
    """
    pids = tuple(pids)
    quick = sum(_kibibytes(f"/proc/{pid}/status", (b"RssAnon:", b"RssShmem:")) for pid in pids) * 1024
    if quick <= enough:
        return quick
    exact = sum(_kibibytes(f"/proc/{pid}/smaps_rollup", (b"Pss_Anon:", b"Pss_Shmem:")) for pid in pids) * 1024
    return exact or quick  # older kernels do not report it


def _kibibytes(file: str, fields: tuple[bytes, ...]) -> int:
    """Add up some fields of a file in /proc; 0 if the process has ended."""
    try:
        with open(file, "rb") as lines:
            return sum(int(line.split()[1]) for line in lines if line.startswith(fields))
    except OSError:
        return 0


def mark_descendants(mark: int) -> None:
    """Give this process, and all its descendants, a mark that survives fork, exec and an empty environment: a limit, in
    microseconds, on the time of real-time processes, so high that it is never reached. Linux only."""
    if sys.platform == "linux":
        with contextlib.suppress(ValueError, OSError):  # the limit here is already lower
            resource.setrlimit(resource.RLIMIT_RTTIME, (mark, mark))


def marked(mark: int, variable: str) -> Iterator[int]:
    """Yield the ids of the processes that have the mark, or that were started with `variable`, as `NAME=value`, in
    their environment; the newest first, because a process that forks and ends soon has another id."""
    wanted = (("limits", str(mark).encode()), ("environ", variable.encode()))
    for pid in sorted((int(name) for name in os.listdir("/proc") if name.isdecimal()), reverse=True):
        for file, text in wanted:
            # It is gone, or another user's.
            with contextlib.suppress(OSError), open(f"/proc/{pid}/{file}", "rb") as content:
                if text in content.read():
                    yield pid
                    break


def describe_end(code: int, file_mb: float) -> str:
    """Describe an exit code, or a signal's number given as a negative code."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    ended = f"its process was killed by {signal_name(-code)}"
    return f"{ended}; {file_limit(file_mb)}" if -code == signal.SIGXFSZ else ended


def file_limit(file_mb: float) -> str:
    """Return what to say about a file that grew too large."""
    return f"reliability.reward_file_mb = {file_mb:g} limits every file that your code writes"
