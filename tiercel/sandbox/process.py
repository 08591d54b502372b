"""Run the user's code in a process: JSON lines over its own socket, a deadline, and an end for everything that it
started.

What is started is a supervisor, which forks the worker and leaves nothing behind (supervisor.py). The worker does not
see environment variables that look like secrets, except those that the recipe names, nor passwords in addresses, and it
has its own temporary directory. What it prints is read separately, and the last lines are kept.
"""

import contextlib
import errno
import json
import os
import re
import resource
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiercel.config.schema import Reliability
from tiercel.errors import EnvironmentProblem
from tiercel.reliability.privacy import keep_private
from tiercel.reliability.redaction import redact, redact_answers
from tiercel.sandbox.supervisor import marked
from tiercel.secret_names import is_secret_name, without_credentials

MOST_NODES = 100_000  # brackets and commas outside texts
DEEPEST = 64  # levels; a tool's schema has fewer than 20
_ESCAPED = re.compile(rb"\\.", re.DOTALL)  # outside a text, where JSON has none, the parser stops at it
_TEXT = re.compile(rb'"[^"]*"?')
_OTHER = re.compile(rb"[^][{}]+")
FOREIGN_REPLY = "its connection received something other than its answers; its process was killed"


class ForeignReply(ValueError):
    """The connection received something that is not a reply: the user's code wrote to it. The message is what to
    report."""

    def __init__(self, message: str = FOREIGN_REPLY):
        super().__init__(message)


def read_reply(line: bytes | bytearray) -> Mapping[str, Any]:
    """Parse a line as a reply, with "?" for half of a surrogate pair, which is not text. Raises ForeignReply."""
    _require_small(_TEXT.sub(b"", _ESCAPED.sub(b"", line)))
    try:
        reply = json.loads(line)
        if b"\\ud" in line.lower():
            reply = json.loads(json.dumps(reply, ensure_ascii=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise ForeignReply from error
    if not isinstance(reply, dict):
        raise ForeignReply
    redacted: dict[str, Any] = redact_answers(reply)
    return redacted


def _require_small(signs: bytes) -> None:
    """Raise ForeignReply if a line, of which the texts have been removed, has too many values or too many levels."""
    nodes = sum(map(signs.count, (b"[", b"{", b",")))
    if nodes > MOST_NODES:
        raise ForeignReply(
            f"got {nodes:,} values in one answer, but at most {MOST_NODES:,} are allowed; its process was killed"
        )
    depth = 0
    for bracket in _OTHER.sub(b"", signs):
        depth += 1 if bracket in b"[{" else -1
        if depth > DEEPEST:
            raise ForeignReply(f"got an answer that is nested more than {DEEPEST} deep; its process was killed")


PRINTED_LINES = 20
LONGEST_PRINTED_LINE = 500  # characters
START_TIMEOUT = 120.0  # seconds to import the user's code, which may need large packages

_CHUNK = 65536  # bytes
_TICK = 0.2  # seconds between checks of whether the process is still alive
_STACK_WAIT = 0.3  # seconds that a hanging process gets to say where it hangs
_EXIT_WAIT = 1.0  # seconds that a process which closed its socket gets to end
_CLOSE_WAIT = 6.0  # seconds that the supervisor gets to end everything
_MARKED_WAIT = 5.0  # seconds that marked processes get to end, even if they keep forking
_LOOKS = 5  # successive looks without a marked process, after which there is none
_LOWEST_MARK = 2**50  # microseconds: 35 years
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tiercel.sandbox.supervisor import main; main(sys.argv[2])"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeResult:
    """The replies that came, and what interrupted the exchange; None if all replies came."""

    replies: tuple[Mapping[str, Any], ...]
    interruption: str | None
    has_ended: bool = False  # whether the process ended by itself


def environment_without_secrets(environment: Mapping[str, str], named: Collection[str] = ()) -> dict[str, str]:
    """Return the variables whose names do not look like secrets, in upper or lower case, without passwords in
    addresses; and those that are `named`, unchanged."""
    return {
        name: value if name in named else without_credentials(value)
        for name, value in environment.items()
        if name in named or not is_secret_name(name)
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessJob:
    """Describes what a process is started for."""

    name: str  # what messages call it
    entry: str  # the worker, as in supervisor.SupervisorTask
    work: Any  # the worker's argument: plain JSON data
    longest_reply: int = 1 << 20  # bytes


class UserProcess:
    """Runs a worker, which runs the user's code."""

    def __init__(self, job: ProcessJob, limits: Reliability, variables: Collection[str] = ()):
        """Start the process; it imports the user's code and then sends its first reply. `variables` are environment
        variables that it sees although they look like secrets."""
        keep_private()
        self._job = job
        self._mark = _LOWEST_MARK + secrets.randbelow(_LOWEST_MARK)
        with contextlib.ExitStack() as undo:
            try:
                self._directory = tempfile.mkdtemp(prefix="tiercel-reward-")
                undo.callback(shutil.rmtree, self._directory, ignore_errors=True)
                self._channel, channel = map(undo.enter_context, socket.socketpair())
                self._control, control = map(undo.enter_context, socket.socketpair())
                self._selector = undo.enter_context(selectors.DefaultSelector())
                self._process = self._started(channel, control, limits, variables)
            except OSError as error:
                open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                remedy = "free memory, processes or disk space"
                if error.errno == errno.EMFILE:
                    remedy = f"raise the number of open files that a process may have, now {open_files:,}: ulimit -n"
                raise EnvironmentProblem(f"the process of {job.name} cannot be started: {error}; {remedy}") from error
            undo.pop_all()
        channel.close()
        control.close()
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._channel.setblocking(False)
        os.set_blocking(self._output.fileno(), False)
        self._received = bytearray()  # the beginning of a reply
        self._unprinted = b""  # the beginning of a printed line
        self._printed: deque[bytes] = deque(maxlen=PRINTED_LINES)
        self.passed_over = 0  # the number of lines printed before those that `printed` returned last
        self._printed_count = 0
        self._selector.register(self._channel, selectors.EVENT_READ)
        self._selector.register(self._output, selectors.EVENT_READ)

    def _started(
        self, channel: socket.socket, control: socket.socket, limits: Reliability, variables: Collection[str]
    ) -> "subprocess.Popen[bytes]":
        charge = {
            "entry": self._job.entry,
            "work": self._job.work,
            "channel": channel.fileno(),
            "control": control.fileno(),
            "trainer": os.getpid(),
            "directory": self._directory,
            "memory_gb": limits.reward_memory_gb,
            "file_mb": limits.reward_file_mb,
            "mark": self._mark,
        }
        arguments = [json.dumps([str(entry) for entry in sys.path]), json.dumps(charge)]
        directories = dict.fromkeys(("TMPDIR", "TMP", "TEMP"), self._directory)
        return subprocess.Popen(
            [sys.executable, "-u", "-c", _BOOTSTRAP, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(channel.fileno(), control.fileno()),
            env={**environment_without_secrets(os.environ, variables), **directories},
            start_new_session=True,
            bufsize=0,
        )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def load(self) -> str | None:
        """Wait until the user's code is imported; return the reason if it cannot be."""
        loaded = self.exchange(b"", reply_count=1, timeout=START_TIMEOUT)
        problem = loaded.interruption if loaded.interruption is not None else _problem(loaded.replies[0])
        return None if problem is None else problem + self.printed_text()

    def exchange(self, request: bytes, *, reply_count: int, timeout: float) -> ExchangeResult:
        """Send a request, which may be empty, and wait for its replies, at most `timeout` seconds in all.

        After an interruption the process cannot be used again; close it.
        """
        deadline = time.monotonic() + timeout
        unsent = memoryview(request)
        replies: list[Mapping[str, Any]] = []
        while len(replies) < reply_count:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return ExchangeResult(replies=tuple(replies), interruption=self._describe_hang(timeout))
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
            self._selector.modify(self._channel, wanted)
            ready = self._selector.select(min(remaining, _TICK))
            if not ready and not self.is_alive:
                return ExchangeResult(replies=tuple(replies), interruption=self._describe_end(), has_ended=True)
            for key, events in ready:
                if key.fileobj is self._output:
                    self._read_output()
                    continue
                try:
                    if events & selectors.EVENT_WRITE:
                        unsent = unsent[self._channel.send(unsent[:_CHUNK]) :]
                    if events & selectors.EVENT_READ:
                        self._read_replies(replies)
                except (ConnectionError, EOFError):
                    return ExchangeResult(replies=tuple(replies), interruption=self._describe_end(), has_ended=True)
                except ForeignReply as foreign:
                    return ExchangeResult(replies=tuple(replies), interruption=str(foreign))
        return ExchangeResult(replies=tuple(replies), interruption=None)

    def printed(self) -> tuple[str, ...]:
        """Return the last lines that were printed since the previous call, at most PRINTED_LINES."""
        for _ in range(PRINTED_LINES):  # bounded, because a thread of the user's code may print for ever
            if not self._read_output():
                break
        if self._unprinted:
            self._printed.append(self._unprinted)
            self._printed_count += 1
            self._unprinted = b""
        lines = tuple(map(_as_text, self._printed))
        self.passed_over, self._printed_count = self._printed_count - len(lines), 0
        self._printed.clear()
        return lines

    def printed_text(self) -> str:
        """Return what `printed` returns, as the end of a message."""
        return in_words(self.printed())

    def close(self) -> None:
        """Kill the process and everything that it started, wait until they are gone, and remove its temporary
        directory."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)  # loader workers may also hold it open
        self._control.close()
        self._process.send_signal(signal.SIGCONT)  # the user's code may have stopped it
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_WAIT)
        if self._process.returncode != 0:  # the user's code killed the supervisor, or keeps stopping it
            self._process.kill()
            self._process.wait()
            kill_marked(self._mark, f"TMPDIR={self._directory}")
            shutil.rmtree(self._directory, ignore_errors=True)
        self._selector.close()
        self._channel.close()
        self._output.close()

    def _read_replies(self, replies: list[Mapping[str, Any]]) -> None:
        """Append the replies that have come. Raises EOFError at the end of the connection, and ForeignReply for
        anything else than a reply."""
        try:
            chunk = self._channel.recv(_CHUNK)
        except BlockingIOError:
            return
        if not chunk:
            raise EOFError
        self._received += chunk
        if b"\n" in chunk:
            *lines, self._received = self._received.split(b"\n")
            for line in lines:
                replies.append(read_reply(line))
        if len(self._received) > self._job.longest_reply:
            raise ForeignReply

    def _read_output(self) -> bool:
        """Read what was printed; return False if there is nothing to read now, or nothing more at all."""
        try:
            chunk = os.read(self._output.fileno(), _CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._output)
            return False
        *lines, self._unprinted = (self._unprinted + chunk).split(b"\n")
        self._unprinted = self._unprinted[-_CHUNK:]
        self._printed += lines
        self._printed_count += len(lines)
        return True

    def _describe_hang(self, timeout: float) -> str:
        """Describe a process that is late, and ask it to print where it is."""
        with contextlib.suppress(OSError):
            self._control.send(b"?")
            time.sleep(_STACK_WAIT)
        return f"no answer within {timeout:g} s; its process was killed"

    def _describe_end(self) -> str:
        """Return what the supervisor says about the end."""
        self._control.settimeout(_EXIT_WAIT)
        try:
            reason = self._control.recv(_CHUNK).decode()
        except OSError:
            return "its process closed the connection; it was killed"
        return reason or "the process that watches over it was killed"


def _problem(reply: Mapping[str, Any]) -> str | None:
    """Return what prevents the user's code from being imported, according to the first reply."""
    problem = reply.get("problem", FOREIGN_REPLY)
    return problem if problem is None or isinstance(problem, str) else FOREIGN_REPLY


def kill_marked(mark: int, variable: str) -> None:
    """Kill the processes that have either mark (supervisor.py), and wait a while; Linux only."""
    if sys.platform != "linux":
        return
    deadline = time.monotonic() + _MARKED_WAIT
    empty_looks = 0
    while empty_looks < _LOOKS and time.monotonic() < deadline:
        empty_looks += 1
        for pid in marked(mark, variable):
            empty_looks = 0
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def in_words(lines: Sequence[str]) -> str:
    """Return printed lines as the end of a message."""
    return "\n".join(["", "it printed:", *(f"  {line}" for line in lines)]) if lines else ""


def _as_text(line: bytes) -> str:
    """Return a printed line as failures show it."""
    return redact(line.decode(errors="replace").rstrip())[:LONGEST_PRINTED_LINE]
