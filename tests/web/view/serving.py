"""The page as users start it: in its own process on a free port."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Served:
    """A page that is served."""

    process: subprocess.Popen
    address: str  # with the token, as printed

    @property
    def port(self) -> int:
        return int(self.address.split(":")[2].split("/")[0])

    @property
    def token(self) -> str:
        return self.address.partition("token=")[2]

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}/{self.token}"


@contextmanager
def served(*runs: Path, state: Path, port: int | None = None, more: Sequence[str] = ()) -> Iterator[Served]:
    """Serve runs inside. `state`: a directory for the user's state."""
    chosen = free_port() if port is None else port
    words = [sys.executable, "-m", "tiercel", "view", *map(str, runs), "--port", str(chosen), *more]
    environment = {**os.environ, "XDG_STATE_HOME": str(state)}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:"), address
        yield Served(process=process, address=address)
    finally:
        process.kill()
        process.wait(10)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
