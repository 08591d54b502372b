"""vLLM servers for the `vllm-server` engine: their command line, and a process on this machine."""

import ctypes
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import httpx

from tiercel.config.engines import VISION_ADAPTERS
from tiercel.config.schema import GrpoRecipe
from tiercel.config.trained_parts import adapted_parts
from tiercel.errors import EnvironmentProblem, TrainingError
from tiercel.log import logger
from tiercel.models.families.base import Family
from tiercel.rollout.vllm.http import DEV_MODE, KEY_VARIABLE, servers_key
from tiercel.rollout.vllm.requests import engine_options, require_served, require_vision_adapters, scheduling

ADAPTERS = 2  # two runs may share a server
HEALTH_POLL_SECONDS = 0.5
NEWS_SECONDS = 20.0
GRACE_SECONDS = 20.0
DEFAULT_PORT = 8000


def server_arguments(recipe: GrpoRecipe, family: Family, visuals: Mapping[str, int]) -> list[str]:
    """Make the command line of a server for the recipe, without its address. Raises EnvironmentProblem if vLLM cannot
    sample for it."""
    require_served(family, "vllm-server")
    options = engine_options(recipe, family, visuals, max(ADAPTERS, recipe.rollout.versions))
    if visuals["video"]:
        options |= {"trust_request_mm_kwargs": True, "trust_request_chat_template": True}
    if recipe.data.template is not None:
        options["chat_template"] = os.path.abspath(recipe.data.template)
    if _may_adapt_vision(recipe, family):
        options["enable_tower_connector_lora"] = True
    if recipe.rollout.continues:
        options["enable_scale_out"] = True
    return _flags({**options, **recipe.rollout.vllm.options})


def _flags(options: Mapping[str, Any]) -> list[str]:
    """Write arguments of vLLM's engine as flags of its server."""
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words


def _may_adapt_vision(recipe: GrpoRecipe, family: Family) -> bool:
    """Return whether the adapter may have vision layers; if a regular expression decides, only the trainer knows.
    Raises EnvironmentProblem if it has some that vLLM would not apply."""
    parts = adapted_parts(recipe)
    if family.image_marker is None or (parts is not None and not {"vision", "projector"} & set(parts)):
        return False
    if parts is not None:
        require_vision_adapters(family, "vllm-server")
    return family.name in VISION_ADAPTERS


def arguments_here(recipe: GrpoRecipe, family: Family, visuals: Mapping[str, int]) -> list[str]:
    """Make the command line of a server on this machine, which may have no GPU."""
    return [*server_arguments(recipe, family, visuals), *_flags(scheduling(recipe, family))]


def server_environment(key: str) -> dict[str, str]:
    """Return the variables that a server needs in its environment."""
    return {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", KEY_VARIABLE: key}


def shell_line(arguments: Sequence[str], port: int) -> str:
    """Return a shell command that starts the same server on another machine."""
    words = ["vllm", "serve", *_model_first(arguments), "--port", str(port)]
    switch = "VLLM_ALLOW_RUNTIME_LORA_UPDATING" if "--enable-lora" in arguments else DEV_MODE
    return f"{switch}=1 {KEY_VARIABLE}=... {shlex.join(words)}"


def server_port(recipe: GrpoRecipe, given: int | None) -> int:
    """Return the port: the given one, or else the one of the recipe's first address on this machine, or else vLLM's
    default."""
    if given is not None:
        return given
    local = (urlsplit(url) for url in recipe.rollout.urls)
    return next((url.port for url in local if url.hostname in ("127.0.0.1", "localhost") and url.port), DEFAULT_PORT)


@contextmanager
def served(
    arguments: Sequence[str],
    port: int,
    key: str,
    *,
    is_over: Callable[[], bool] = lambda: False,
    environment: Mapping[str, str] | None = None,
) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a server on 127.0.0.1 and wait until it answers. At the end it is stopped, with all processes that it
    started. Raises EnvironmentProblem if it ends before it answers, or if the port is in use."""
    if find_spec("vllm") is None:
        raise EnvironmentProblem("the package vllm is not installed here; pip install vllm")
    _require_free_port(port)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **(environment or {}), **server_environment(key)},
        start_new_session=True,
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )
    try:
        _wait_for_health(process, f"http://127.0.0.1:{port}/health", is_over)
        yield process
    finally:
        end_group(process)


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """Send SIGTERM to the server's process group, and later SIGKILL to the processes that are left."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def new_key() -> str:
    """Return the user's key from the environment, or a random one. Raises EnvironmentProblem if the user's cannot be a
    key."""
    return servers_key() or secrets.token_urlsafe(24)


def watch(process: "subprocess.Popen[bytes]", is_over: Callable[[], bool]) -> None:
    """Wait until `is_over` returns true. Raises TrainingError if the server ends first."""
    while not is_over():
        if (code := process.poll()) is not None:
            raise TrainingError(f"the vLLM server ended on its own with exit code {code}; its last lines are above")
        time.sleep(HEALTH_POLL_SECONDS)


def _wait_for_health(process: "subprocess.Popen[bytes]", url: str, is_over: Callable[[], bool]) -> None:
    started = news = time.monotonic()
    while not is_over():
        if (code := process.poll()) is not None:
            raise EnvironmentProblem(
                f"the vLLM server ended with exit code {code} before it answered; its last lines are above"
            )
        with suppress(httpx.HTTPError):
            if httpx.get(url, timeout=HEALTH_POLL_SECONDS, trust_env=False).status_code == 200:
                return
        if time.monotonic() - news > NEWS_SECONDS:
            news = time.monotonic()
            logger.info(f"waiting for vLLM, {news - started:.0f} s so far")
        time.sleep(HEALTH_POLL_SECONDS)


def _require_free_port(port: int) -> None:
    """Raise EnvironmentProblem if the port is in use, because another server would answer in place of this one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise EnvironmentProblem(f"127.0.0.1:{port} cannot be used: {error}; use another --port") from error


def _end_with_parent() -> None:
    """Run in the child: ask for SIGTERM when the parent ends, even by SIGKILL (PR_SET_PDEATHSIG of prctl, which is
    1)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _model_first(arguments: Sequence[str]) -> list[str]:
    """Move the model to the first place, as `vllm serve` needs it."""
    place = list(arguments).index("--model")
    return [arguments[place + 1], *arguments[:place], *arguments[place + 2 :]]
