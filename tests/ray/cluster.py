"""A local Ray cluster of two raylets, and the processes that a run has on it."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.vllm.servers import ENVIRONMENT

ROOT = Path(__file__).parents[2]
LAUNCHER = ROOT / "docs/launch/tiercel_ray.py"
VLLM = ROOT / ".venv-vllm/bin/python"
MARK = "TIERCEL_TEST_CLUSTER"
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # otherwise Ray uses the machine's address for 127.0.0.1
OWN = {"WORLD_SIZE=2", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"}  # in the environment of processes that are not Ray's
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_memory_monitor_refresh_ms": "0"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One line of the process table."""

    pid: int
    session: int
    words: Sequence[str]
    environment: frozenset[str]


def processes() -> list[Process]:
    """All processes that are not zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            words = (entry / "cmdline").read_text(errors="replace").split("\0")
            environment = frozenset((entry / "environ").read_text(errors="replace").split("\0"))
        except OSError:
            continue
        if state != "Z":
            found.append(Process(pid=int(entry.name), session=int(session), words=words, environment=environment))
    return found


class Cluster:
    """Two raylets on 127.0.0.1, each with room for one trainer and one server."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex  # in the environment of everything that the cluster starts
        self.directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # sockets need a short path
        self.environment = {
            **os.environ,
            **ENVIRONMENT,
            **QUIET,
            **LOOPBACK,
            MARK: self.mark,
            "RAY_TMPDIR": self.directory,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.ray.two_raylets"],
            cwd=ROOT,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.environment["RAY_ADDRESS"] = self.process.stdout.readline().strip()
        assert self.environment["RAY_ADDRESS"]

    def end(self) -> None:
        """End both. Nothing of the cluster is left."""
        self.process.communicate(timeout=60)
        wait_for(lambda: not self.of_cluster(), 30)
        shutil.rmtree(self.directory)

    def of_cluster(self) -> list[Process]:
        return [process for process in processes() if f"{MARK}={self.mark}" in process.environment]

    def ranks(self) -> dict[int, int]:
        """Process ids of the trainer ranks, by rank."""
        found = [each for each in self.of_cluster() if "tiercel" in each.words]
        return {rank: each.pid for each in found for rank in range(2) if f"RANK={rank}" in each.environment}

    def sessions(self) -> set[int]:
        """Sessions of ranks, servers and all that they have started. vLLM's engine hides its environment, but not its
        session."""
        return {each.session for each in self.of_cluster() if OWN & each.environment}


def of_sessions(sessions: set[int]) -> list[Process]:
    return [process for process in processes() if process.session in sessions]


def wait_for(is_so: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RayServer:
    """A vLLM server that Ray has placed; the interface of tests.vllm.servers.Server, as far as tests need it."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        (pid,) = [p.pid for p in processes() if p.pid == p.session and p.words[-3:-1] == ["--port", str(self.port)]]
        return pid

    def signal(self, number: int) -> None:
        os.killpg(self.pid, number)

    def kill(self) -> int:
        """SIGKILL to vLLM and its engine; the process id that it had."""
        pid = self.pid
        os.killpg(pid, signal.SIGKILL)
        return pid


@contextmanager
def launched(
    cluster: Cluster, directory: Path, recipe: Path, servers: int = 0, first_port: int = 0
) -> "Iterator[tuple[subprocess.Popen[bytes], Path]]":
    """The launcher with docs/launch/ray.yaml, of which the test changes numbers and resources, and its log. A test that
    fails leaves nothing behind."""
    plan = yaml.safe_load((LAUNCHER.parent / "ray.yaml").read_text())
    own = {"python": str(VLLM), "flags": "--enforce-eager --no-enable-chunked-prefill", "first_port": first_port}
    plan["ranks"] |= {"count": 2, "each": {"CPU": 0.5, "trainer": 1}}
    plan["servers"] |= {"count": servers, "each": {"CPU": 0.5, "server": 1}, **own}
    (directory / "ray.yaml").write_text(yaml.safe_dump(plan | {"recipe": str(recipe)}))
    log = directory / "ray.log"
    words = [sys.executable, LAUNCHER, directory / "ray.yaml"]
    with log.open("ab") as file:
        process = subprocess.Popen(words, env=cluster.environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield process, log
    finally:
        process.kill()
        process.wait()
