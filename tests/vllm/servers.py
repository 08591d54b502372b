"""Real vLLM servers for the tests, each started by `tiercel serve` and ended by pid."""

import atexit
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tests.forked import Command, Nursery

START_SECONDS = 240
LIFE_SECONDS = 1800  # longer than the whole suite
MOST_RUNNING = 2  # servers of one worker of the tests
KEY = "a-key-of-the-tests"
ENVIRONMENT = {
    "VLLM_API_KEY": KEY,
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's process computes: no worker that imports everything again
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
IMPORTS = ("torch", "vllm", "transformers", "peft", "tiercel.training.grpo.loop", "tiercel.rollout.vllm.colocated")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@cache
def nursery() -> Nursery:
    """What commands are forked from, for as long as the tests run."""
    made = Nursery([name for name in IMPORTS if find_spec(name.partition(".")[0]) is not None], ENVIRONMENT)
    atexit.register(made.close)
    return made


def run_tiercel(*words: object, timeout: float = 400.0) -> "subprocess.CompletedProcess[str]":
    """Run a command to its end."""
    return nursery().run([*map(str, words)], timeout)


def start_tiercel(*words: object, output: Path) -> Command:
    """Start a command that continues while the test does. Its output goes to a file."""
    with output.open("wb") as file:
        return nursery().start([*map(str, words)], file)


def start_server(*words: object, output: Path, environment: Mapping[str, str]) -> Command:
    """Start `tiercel serve`, which ends by itself some time after the tests have been killed."""
    with output.open("wb") as file:
        return nursery().start(["serve", *map(str, words)], file, environment=environment, life_seconds=LIFE_SECONDS)


@dataclass
class Server:
    """`tiercel serve RECIPE` and the vLLM process that it started."""

    recipe: Path
    log: Path
    port: int = field(default_factory=free_port)
    flags: str = ""  # for vLLM, in addition to the recipe's
    environment: Mapping[str, str] = field(default_factory=dict)
    process: Command | None = None

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> "Server":
        words = (self.recipe, "--port", self.port, f"--vllm=--enforce-eager {self.flags}")
        self.process = start_server(*words, output=self.log, environment=self.environment)
        return self

    def wait(self) -> "Server":
        """Until it answers."""
        assert self.process is not None
        deadline = time.monotonic() + START_SECONDS
        while "answers on" not in self.said():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server did not start:\n{self.said()[-4000:]}")
            time.sleep(0.2)
        return self

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def vllm_pid(self) -> int:
        found = re.search(r"vLLM \(process (\d+)\)", self.said())
        assert found is not None
        return int(found[1])

    def signal(self, number: int) -> None:
        """A signal to vLLM and all that it started, from outside."""
        os.killpg(self.vllm_pid(), number)

    def kill(self) -> int:
        """SIGKILL to them; `tiercel serve`'s exit code."""
        assert self.process is not None
        self.signal(signal.SIGKILL)
        return self.process.wait(30)

    def end(self) -> int | None:
        """SIGTERM to `tiercel serve`, as a user's Ctrl-C."""
        if self.process is None:
            return None
        self.process.terminate()
        return self.process.wait(60)


class Fleet:
    """Servers by name, the one that was asked for last at the end. Each is started when it is asked for. Only a few
    run at a time, because one takes about 3 GB; all are ended at the end."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.servers: dict[str, Server] = {}

    def started(self, name: str, recipe: Path, flags: str = "", environment: Mapping[str, str] | None = None) -> Server:
        """Return the server, starting or running; `wait` for it before use."""
        server = self.servers.pop(name, None)
        if server is None or not server.is_running:
            while len(running := self._running()) >= MOST_RUNNING:
                running[0].end()
            port = server.port if server is not None else free_port()
            log = self.directory / f"{name}-{time.monotonic_ns()}.log"
            server = Server(recipe=recipe, log=log, port=port, flags=flags, environment=environment or {}).start()
        self.servers[name] = server
        return server

    def _running(self) -> list[Server]:
        return [server for server in self.servers.values() if server.is_running]

    def end(self) -> None:
        for server in self._running():
            server.end()
