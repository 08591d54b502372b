"""Commands of tiercel in processes that start with its heavy imports done.

A nursery is a process that has imported what commands need and does nothing else. It forks for each command, so a
command starts in milliseconds although importing vLLM takes half a minute. The command's process has its own folder,
environment, session and output, and ends like any other; it can be killed by its pid. Settings that are chosen while
modules are imported, such as a log level, are those from the nursery's start.
"""

import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any, BinaryIO

LARGEST_REQUEST = 1 << 20  # bytes


def _line(pipe: int) -> bytes:
    """Read up to the end of a line, and no further."""
    found = b""
    while not found.endswith(b"\n") and (byte := os.read(pipe, 1)):
        found += byte
    return found


class Command:
    """A command that was started: what tests use of subprocess.Popen."""

    def __init__(self, words: Sequence[str], answers: int):
        self.args = words
        self.returncode: int | None = None
        self._answers = answers  # a pipe from its keeper: the pid, and the exit code once it has ended
        self.pid = int(_line(answers))  # the exit code may be behind it already
        os.set_blocking(answers, False)

    def poll(self) -> int | None:
        """Return the exit code, the negative number of the signal that killed it, or None if it is still running."""
        if self.returncode is None:
            with suppress(BlockingIOError):
                self.returncode = int(os.read(self._answers, 32))
                os.close(self._answers)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        started = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() - started > timeout:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """A process that has imported `modules` and forks for each command. It ends with the process that made it."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]):
        self.environment = {**os.environ, **environment}
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [sys.executable, "-m", "tests.forked", str(theirs.fileno()), *modules]
        self._process = subprocess.Popen(words, env=self.environment, pass_fds=[theirs.fileno()])
        theirs.close()

    def start(
        self,
        words: Sequence[str],
        out: BinaryIO,
        err: BinaryIO | None = None,
        module: str = "tiercel",
        environment: Mapping[str, str] | None = None,
        life_seconds: int = 0,
    ) -> Command:
        """Start `python -m MODULE WORDS`, whose output goes to files. `environment` is added to the nursery's own.
        After `life_seconds`, if they are given, the command gets SIGTERM."""
        asked = {
            "module": module,
            "words": list(words),
            "folder": os.getcwd(),
            "environment": {**self.environment, **(environment or {})},
            "life_seconds": life_seconds,
        }
        request = json.dumps(asked)
        reading, writing = os.pipe()
        try:
            files = [out.fileno(), (err or out).fileno(), writing]
            socket.send_fds(self._requests, [request.encode()], files)
        finally:
            os.close(writing)
        return Command(words, reading)

    def run(self, words: Sequence[str], timeout: float) -> "subprocess.CompletedProcess[str]":
        """Run it to its end. Where that takes longer than `timeout` seconds, it is killed with all of its session."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            command = self.start(words, out, err)
            try:
                code = command.wait(timeout)
            except subprocess.TimeoutExpired:
                os.killpg(command.pid, signal.SIGKILL)
                raise
            said = [_text_of(file) for file in (out, err)]
        return subprocess.CompletedProcess(list(words), code, *said)

    def close(self) -> None:
        self._requests.close()
        self._process.wait()


@cache
def commands() -> Nursery:
    """Return what `tiercel grpo` and `tiercel sft` are forked from, for as long as the tests run."""
    families = [f"transformers.models.{name}.modeling_{name}" for name in ("qwen2_vl", "qwen2_5_vl")]
    loops = [f"tiercel.training.{name}.loop" for name in ("grpo", "offline")]
    made = Nursery(["peft", *families, *loops], {"OMP_NUM_THREADS": "1"})
    atexit.register(made.close)
    return made


def run_ranks(nursery: Nursery, count: int, module: str, words: Sequence[str], timeout: float) -> str:
    """Run `python -m MODULE WORDS` as `count` ranks on this machine, as a launcher starts them, and return what they
    print. Once a rank has failed, the others are killed."""
    world = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    world["MASTER_PORT"] = str(free_port())
    with tempfile.TemporaryFile() as out:
        ranks = [
            nursery.start(words, out, module=module, environment={**world, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(count)
        ]
        deadline = time.monotonic() + timeout
        while any(rank.poll() is None for rank in ranks):
            if time.monotonic() > deadline or any(rank.poll() for rank in ranks):
                break
            time.sleep(0.02)
        codes = [rank.poll() for rank in ranks]
        for rank in ranks:
            rank.kill()
            rank.wait(30)
        said = _text_of(out)
    assert codes == [0] * count, f"the ranks ended with {codes}:\n{said[-8000:]}"
    return said


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def _text_of(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def _next_command(requests: socket.socket) -> dict[str, Any] | None:
    """Fork for each request. Return the request in the process that is to run it, None in the nursery at its end."""
    while True:
        data, files, *_ = socket.recv_fds(requests, LARGEST_REQUEST, 3)
        if not data:
            return None
        keeper = os.fork()
        if keeper:
            for file in files:
                os.close(file)
            os.waitpid(keeper, 0)  # this leaves another process behind, so that the nursery is free
            continue
        if os.fork():
            os._exit(0)
        requests.close()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.dup2(files[0], 1)
            os.dup2(files[1], 2)
            for file in files:
                os.close(file)
            return json.loads(data)
        os.write(files[2], f"{pid}\n".encode())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(files[2], f"{code}\n".encode())
        os._exit(0)


def main() -> None:
    """Import the modules, wait for commands; run the one that this process was forked for."""
    for module in sys.argv[2:]:
        import_module(module)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"a process with {threads} threads cannot be forked"
    request = _next_command(socket.socket(fileno=int(sys.argv[1])))
    if request is None:
        return
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    signal.alarm(request["life_seconds"])
    sys.argv[:] = [request["module"], *request["words"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
