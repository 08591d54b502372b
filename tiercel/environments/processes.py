"""The processes of a run's environments and tools: one per trajectory in progress, started as needed and kept."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from tiercel.config.schema import Reliability
from tiercel.environments.answer_parts import LARGEST_PICTURES
from tiercel.sandbox.process import FOREIGN_REPLY, ProcessJob, UserProcess

WORKER = "tiercel.environments.worker:run"


class EnvironmentFailure(Exception):
    """Raised if the user's code cannot continue a trajectory. The message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UserCode:
    """The names of the user's own code, as `file.py:name` or `package.module:name`."""

    environment: str | None  # a class
    functions: tuple[str, ...]

    @property
    def exists(self) -> bool:
        """Return whether there is any code."""
        return self.environment is not None or bool(self.functions)

    @property
    def name(self) -> str:
        """Return the code's name for messages."""
        if self.environment is not None:
            return f"environment {self.environment}"
        return f"tools {', '.join(self.functions)}".rstrip()


class EnvironmentProcess(UserProcess):
    """A process with the user's code, for one trajectory at a time, or for all that were forked from one."""

    def __init__(self, code: UserCode, limits: Reliability):
        """Start the process and wait until the code is imported. Raises EnvironmentFailure if it cannot be, and
        EnvironmentProblem if no process can be started."""
        self._timeout, self._number = limits.reward_timeout, 0
        self._lock = threading.Lock()
        self._has_failed = False
        self.users, self.is_spent = 1, False  # trajectories, and whether one of them failed; changed by Processes
        longest = 2 * LARGEST_PICTURES  # longer than base64 and a text
        super().__init__(
            ProcessJob(name=f"the {code.name}", entry=WORKER, work=asdict(code), longest_reply=longest), limits
        )
        try:
            if (problem := self.load()) is not None:
                raise EnvironmentFailure(problem)
        except BaseException:
            self.close()
            raise

    def ask(self, ask: str, *, copy: int = 0, seconds: float | None = None, **fields: Any) -> Mapping[str, Any]:
        """Call one of worker.Host's methods. `copy` is a number that its `fork` gave. `seconds` replaces
        `reliability.reward_timeout`. After an EnvironmentFailure the process must be closed."""
        with self._lock:
            if self._has_failed:
                raise EnvironmentFailure(f"{ask}: a trajectory that was forked from the same one ended the process")
            self._has_failed = True
            reply = self._asked(ask, {"copy": copy, "fields": fields}, seconds or self._timeout)
            self._has_failed = False
            return reply

    def _asked(self, ask: str, asked_of: Mapping[str, Any], seconds: float) -> Mapping[str, Any]:
        self._number += 1
        self.printed()  # discards what was printed before this request
        request = json.dumps({"number": self._number, "ask": ask, **asked_of}).encode() + b"\n"
        exchange = self.exchange(request, reply_count=1, timeout=seconds)
        reply: Mapping[str, Any] = exchange.replies[-1] if exchange.replies else {"failure": exchange.interruption}
        failure = reply.get("failure")
        if exchange.replies and (len(exchange.replies) > 1 or reply.get("number") != self._number):
            failure = FOREIGN_REPLY
        if failure is not None:
            tool = asked_of["fields"].get("name")
            asked = ask if tool is None else f"{ask} {tool}"
            raise EnvironmentFailure(f"{asked}: {failure}{self.printed_text()}")
        return reply


class Processes:
    """A pool of processes, each reused for the next trajectory. Several threads may call it."""

    def __init__(self, code: UserCode, limits: Reliability):
        self._code, self._limits = code, limits
        self._lock = threading.Lock()
        self._idle: list[EnvironmentProcess] = []
        self._all: set[EnvironmentProcess] = set()
        self._is_closed = False

    def take(self) -> EnvironmentProcess:
        """Return an idle process that is alive, or a new one. Raises EnvironmentFailure."""
        while (idle := self._pop()) is not None:
            if idle.is_alive:
                idle.users = 1
                return idle
            self.end(idle)
        process = EnvironmentProcess(self._code, self._limits)
        with self._lock:
            self._all.add(process)
            is_late = self._is_closed
        if is_late:
            self.end(process)
            raise EnvironmentFailure("the run ends")
        return process

    @contextmanager
    def lent(self) -> Iterator[EnvironmentProcess]:
        """Lend a process to a block of code. Afterwards it is idle again, or ended if the block fails."""
        process = self.take()
        try:
            yield process
        except BaseException:
            self.end(process)
            raise
        self.give_back(process)

    def _pop(self) -> EnvironmentProcess | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def share(self, process: EnvironmentProcess) -> None:
        """Let a trajectory use the process that was forked from one of its own."""
        with self._lock:
            process.users += 1

    def give_back(self, process: EnvironmentProcess) -> None:
        """Keep a process if its trajectory, or the last of several, has ended well."""
        with self._lock:
            process.users -= 1
            if not process.users and not process.is_spent:
                self._idle.append(process)
                return
        if not process.users:
            self._close(process)

    def end(self, process: EnvironmentProcess) -> None:
        """End a process whose trajectory has failed, after the last of several."""
        with self._lock:
            process.users -= 1
            process.is_spent = True
        if process.users <= 0:
            self._close(process)

    def _close(self, process: EnvironmentProcess) -> None:
        with self._lock:
            if process not in self._all:
                return
            self._all.remove(process)
        process.close()

    def close(self) -> None:
        """End all processes; a request in progress fails."""
        with self._lock:
            self._is_closed = True
            processes = list(self._all)
        for process in processes:
            self._close(process)
