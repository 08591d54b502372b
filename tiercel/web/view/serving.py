"""Running the server: its port, its token, and its end."""

import asyncio
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import uvicorn
from anyio.to_thread import current_default_thread_limiter

from tiercel.errors import EnvironmentProblem
from tiercel.web.view.runs import Runs
from tiercel.web.view.server import make_app

FIRST_PORT, LAST_PORT = 8420, 8439  # tried in turn, so that an address is mostly good again after a restart
TOKEN_BYTES = 24
THREADS = 4  # that answer; each keeps memory of its own
_LOOK_SECONDS = 0.5


def serve(runs: Sequence[Path], port: int | None, *, beside: int | None) -> None:
    """Serve until SIGINT or SIGTERM; `beside`: until this process, which has started this one, has ended, of a run that
    may not have begun. Raises RunError if a path is not a run, EnvironmentProblem if the port is taken."""
    shown, listening = Runs(runs, may_come=beside is not None), bound(port)
    token = kept_token(listening.getsockname()[1]) if beside is None else secrets.token_urlsafe(TOKEN_BYTES)
    if shown.left_out:
        print(f"{shown.left_out:,} runs that changed earlier are left out; name fewer folders", file=sys.stderr)
    app, following = make_app(shown, token)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=2, server_header=False
    )
    server = uvicorn.Server(config)
    address = f"http://127.0.0.1:{listening.getsockname()[1]}/?token={token}"
    print(address if beside is None else f"page of the run: {address}", flush=True)
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(server, listening, following.stop, beside))


async def _serve(server: uvicorn.Server, listening: socket.socket, stop, parent: int | None) -> None:
    current_default_thread_limiter().total_tokens = THREADS
    serving = asyncio.create_task(server.serve([listening]))
    while not serving.done():
        if parent is not None and os.getppid() != parent:
            server.should_exit = True
        if server.should_exit:
            stop()  # open pages would hold up the end
        await asyncio.wait([serving], timeout=_LOOK_SECONDS)
    serving.result()


def bound(port: int | None) -> socket.socket:
    """Return a socket that listens on 127.0.0.1; without a port the first free one. Raises EnvironmentProblem."""
    for candidate in [port] if port is not None else [*range(FIRST_PORT, LAST_PORT + 1), 0]:
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", candidate))
            listening.listen()  # whoever opens the address that is printed next waits for the server
            return listening
        except OSError as error:
            listening.close()
            reason = error.strerror
    raise EnvironmentProblem(f"--port: 127.0.0.1:{port} cannot be used: {reason}; use another port, or none")


def kept_token(port: int) -> str:
    """Return the secret of this user's pages on a port. It is kept in the user's state directory, readable by the user
    alone, so that a page goes on when its server is started again; if that cannot be written, a new one."""
    token = secrets.token_urlsafe(TOKEN_BYTES)
    with suppress(OSError, RuntimeError):  # RuntimeError: neither HOME nor a user of this number, as in a container
        folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "tiercel"
        file = folder / f"view-token-{port}"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(FileExistsError):
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="ascii") as new:
                new.write(token)
        kept = file.read_text(encoding="ascii").strip()
        if len(kept) == len(token) and file.stat().st_uid == os.getuid() and not file.stat().st_mode & 0o077:
            return kept
    return token
