"""A reward's own process: JSON lines over a socket of its own, a deadline, and an end for all that it started.

The process leads a session of its own, so that one signal reaches its children too, and sees no variable of the
environment that looks like a secret. What it prints is read aside and its last lines are kept.
"""

import contextlib
import fnmatch
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tiercel.errors import EnvironmentProblem
from tiercel.reliability.redaction import SECRET_VARIABLES, redact

PRINTED_LINES = 20
LONGEST_PRINTED_LINE = 500  # characters

_CHUNK = 65536  # bytes
_TICK = 0.2  # seconds between looks at whether the process still lives
_STACK_WAIT = 0.3  # seconds given to a hanging process to say where it hangs
_EXIT_WAIT = 1.0  # seconds for a process that closed its socket to be gone
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tiercel.rewards.worker import main; main(int(sys.argv[2]), sys.argv[3])"
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """The replies that came, and what ended the exchange before all had (None: all came)."""

    replies: tuple[Mapping[str, Any], ...]
    interruption: str | None


def environment_without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables whose names do not look like a secret's, in either case."""
    return {
        name: value
        for name, value in environment.items()
        if not any(fnmatch.fnmatchcase(name.upper(), pattern) for pattern in SECRET_VARIABLES)
    }


class RewardProcess:
    """A running worker.py for one `file.py:function` or `package.module:function`."""

    def __init__(self, call: str):
        """Start the process; it imports the user's code and then sends its first reply."""
        ours, theirs = socket.socketpair()
        arguments = [json.dumps([str(entry) for entry in sys.path]), str(theirs.fileno()), call]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-u", "-c", _BOOTSTRAP, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(),),
                    env=environment_without_secrets(os.environ),
                    start_new_session=True,
                    bufsize=0,
                )
            except OSError as error:
                ours.close()
                raise EnvironmentProblem(
                    f"the process of the reward {call} cannot be started: {error}; free memory or processes"
                ) from error
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._channel = ours
        self._channel.setblocking(False)
        os.set_blocking(self._output.fileno(), False)
        self._call = call
        self._received = bytearray()  # the beginning of a reply
        self._unprinted = b""  # the beginning of a printed line
        self._printed: deque[str] = deque(maxlen=PRINTED_LINES)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._channel, selectors.EVENT_READ)
        self._selector.register(self._output, selectors.EVENT_READ)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def exchange(self, request: bytes, *, reply_count: int, timeout: float) -> Exchange:
        """Send a request (it may be empty) and wait for its replies, at most `timeout` seconds in all.

        After an interruption the process is of no more use; close it.
        """
        deadline = time.monotonic() + timeout
        unsent = memoryview(request)
        replies: list[Mapping[str, Any]] = []
        while len(replies) < reply_count:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return Exchange(replies=tuple(replies), interruption=self._describe_hang(timeout))
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
            self._selector.modify(self._channel, wanted)
            ready = self._selector.select(min(remaining, _TICK))
            if not ready and not self.is_alive:
                return Exchange(replies=tuple(replies), interruption=self._describe_end())
            for key, events in ready:
                if key.fileobj is self._output:
                    self._read_output()
                    continue
                try:
                    if events & selectors.EVENT_WRITE:
                        unsent = unsent[self._channel.send(unsent[:_CHUNK]) :]
                    if events & selectors.EVENT_READ:
                        replies.extend(self._read_replies())
                except (ConnectionError, EOFError):
                    return Exchange(replies=tuple(replies), interruption=self._describe_end())
        return Exchange(replies=tuple(replies), interruption=None)

    def printed(self) -> tuple[str, ...]:
        """The last lines printed since the last call, at most PRINTED_LINES."""
        for _ in range(PRINTED_LINES):  # bounded: a thread of the user's may print for ever
            if not self._read_output():
                break
        if self._unprinted:
            self._keep_line(self._unprinted)
            self._unprinted = b""
        lines = tuple(self._printed)
        self._printed.clear()
        return lines

    def close(self) -> None:
        """Kill the process and all that it started, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS answers EPERM for the dead
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._selector.close()
        self._channel.close()
        self._output.close()

    def _read_replies(self) -> list[Mapping[str, Any]]:
        try:
            chunk = self._channel.recv(_CHUNK)
        except BlockingIOError:
            return []
        if not chunk:
            raise EOFError
        self._received += chunk
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        return [json.loads(line) for line in lines]

    def _read_output(self) -> bool:
        """Read what was printed; False where there is nothing (any more)."""
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
        for line in lines:
            self._keep_line(line)
        return True

    def _keep_line(self, line: bytes) -> None:
        text = redact(line.decode(errors="replace").rstrip())[:LONGEST_PRINTED_LINE]
        logger.debug("%s: %s", self._call, text)
        self._printed.append(text)

    def _describe_hang(self, timeout: float) -> str:
        """What to say of a process that is late; asks it to print where it is."""
        if self.is_alive:
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(_STACK_WAIT)
        return f"no answer within {timeout:g} s; its process was killed"

    def _describe_end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_WAIT)
        code = self._process.returncode
        if code is None:
            return "its process closed the connection; it was killed"
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"
