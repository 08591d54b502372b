"""A Python process for code that may die, hang or print anything."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from tempfile import TemporaryFile
from typing import IO

from tiercel.doctor.worker import DONE
from tiercel.errors import EnvironmentProblem

_EXIT_WAIT = 5.0  # seconds until a process whose output has ended must have exited
_SIGNAL_NAMES = {each.value: each.name for each in signal.Signals}
_BOOTSTRAP = (
    "import json, resource, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])); "
    "from importlib import import_module; import_module(sys.argv[2]).main(sys.argv[3:])"
)


class Child:
    """Run a module's `main(arguments)` with this process's import path. At its end the context kills the process and
    all processes that it started."""

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str] | None = None):
        self._errors = TemporaryFile()  # noqa: SIM115
        path = json.dumps([str(entry) for entry in sys.path])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOTSTRAP, path, module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                errors="replace",
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentProblem(f"cannot start a process: {error}; free memory or end other processes") from error
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_pass_on, args=(self._output, self._lines), daemon=True).start()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a process that has ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._errors.close()

    def line(self, seconds: float) -> str | None:
        """Return the next line that it prints; None after the last. Raises TimeoutError where none comes in time."""
        try:
            return self._lines.get(timeout=max(0.0, seconds))
        except queue.Empty:
            raise TimeoutError from None

    def ending(self) -> tuple[str, str]:
        """Return how it ended, after its last line: in words, and the name of the signal that killed it, if any."""
        try:
            code = self._process.wait(_EXIT_WAIT)
        except subprocess.TimeoutExpired:
            return "its process closed its output but kept running", ""
        if code < 0:
            name = _SIGNAL_NAMES.get(-code, f"signal {-code}")
            return f"its process was killed by {name}", name
        return self.last_error() or f"its process ended with exit code {code}", ""

    def failure(self, deadline: float) -> str | None:
        """Wait until it prints DONE; else return why it does not. Raises TimeoutError where nothing comes by the
        deadline, in seconds of the monotonic clock."""
        while (line := self.line(deadline - time.monotonic())) not in (None, DONE):
            pass
        return self.ending()[0] if line is None else None

    def last_error(self) -> str:
        """Return the last line that it has written to its standard error so far."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _pass_on(output: IO[str], lines: "queue.Queue[str | None]") -> None:
    with output:
        for line in output:
            lines.put(line.rstrip("\n"))
    lines.put(None)
