"""Requests to one vLLM server over HTTP. Failures are of two kinds: another attempt may succeed, or only the user can
help.

Calls are coroutines, so that a cancelled call closes its connection at once.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tiercel.errors import EnvironmentProblem
from tiercel.http_json import AnswerType, HttpReply, NoAnswer, WrongAnswer, ask, brief, key_of, new_client
from tiercel.reliability.redaction import redact
from tiercel.rollout.vllm.protocol import Completions, ModelList, Refusal, ServedModel

KEY_VARIABLE = "VLLM_API_KEY"  # the variable that vLLM itself uses
DEV_MODE = "VLLM_SERVER_DEV_MODE"  # with 1 the server has CALL and RESETS
HEALTH_SECONDS = 5.0
MODELS_SECONDS = 60.0
ADAPTER_SECONDS = 60.0  # to load an adapter
SHORT_ANSWER = 1 << 22  # bytes of any answer that is not a completion
LONGEST_MESSAGE = 500  # characters of a server's message
MODELS, CHAT, GENERATE = "/v1/models", "/v1/chat/completions", "/inference/v1/generate"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
CALL, RESETS = "/collective_rpc", ("/reset_encoder_cache", "/reset_prefix_cache")
WEIGHTS_SECONDS = 600.0  # to read a whole model


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerRequirements:
    """What a server must have been started with."""

    model_names: tuple[str, ...]  # possible names of the recipe's model; only the last part of a path is compared
    row_tokens: int  # tokens of a prompt and its completion
    key: str = "model.path"  # of the recipe, which names the model


class ServerFault(Exception):
    """Raised if the server gave no usable answer; another attempt, here or at another server, may get one."""


class InvalidAnswer(ServerFault):
    """Raised if the server gave a complete answer that cannot be right. A server that does so often is no longer
    used."""


class AdapterMissing(ServerFault):
    """Raised if the server does not know the policy, mostly because it was restarted."""


def servers_key() -> str | None:
    """Return the servers' key from the environment; None if there is none. Raises EnvironmentProblem if it cannot be a
    key."""
    try:
        return key_of(KEY_VARIABLE)
    except ValueError as error:
        raise EnvironmentProblem(str(error)) from None


class VllmServer:
    """Client of an unchanged `vllm serve`. Methods raise ServerFault if another attempt may succeed, and
    EnvironmentProblem if only the user can help."""

    def __init__(self, url: str, key: str | None, timeout_seconds: float):
        address = url.rstrip("/").removesuffix("/v1")
        self.url = redact(address)  # for messages
        self._seconds = timeout_seconds
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None)  # the callers bound how many requests are under way
        self._client = new_client(base_url=address, headers=headers, limits=limits)

    async def close(self) -> None:
        await self._client.aclose()

    async def is_healthy(self) -> bool:
        """Return whether the server answers /health with 200."""
        request = self._client.build_request("GET", "/health")
        try:
            reply = await ask(self._client, request, seconds=HEALTH_SECONDS, most_bytes=SHORT_ANSWER)
        except (NoAnswer, WrongAnswer):
            return False
        return reply.status == 200

    async def models(self) -> tuple[ServedModel, ...]:
        """Return the base model, then the loaded adapters."""
        return _read(MODELS, await self._request("GET", MODELS, None, MODELS_SECONDS), ModelList).data

    async def fitting(self, needs: ServerRequirements) -> ServedModel:
        """Return the base model. Raises EnvironmentProblem, with the right flag, if it is a different one or its
        context is too short."""
        base = (await self.models())[0]
        if base.max_model_len is not None and base.max_model_len < needs.row_tokens:
            raise EnvironmentProblem(
                f"{self.url}: accepts {base.max_model_len} tokens, but a prompt and its completion have up to "
                f"{needs.row_tokens}; start it with --max-model-len {needs.row_tokens}"
            )
        if base.root and Path(base.root).name not in {Path(name).name for name in needs.model_names}:
            raise EnvironmentProblem(
                f"{self.url}: serves {brief(base.root)}, but the recipe's {needs.key} is {needs.model_names[0]}; "
                "start it with that model"
            )
        return base

    async def load(self, name: str, directory: Path) -> None:
        """Load an adapter. An adapter of this name that is already loaded is the same, because the name has its
        hash."""
        body = {"lora_name": name, "lora_path": str(directory)}
        reply = await self._request("POST", LOAD, body, ADAPTER_SECONDS)
        if reply.status < 400:
            return
        message = _message(reply)
        if "already" in message and "loaded" in message:
            return
        raise EnvironmentProblem(f"{self.url}: {_load_advice(reply.status, message, directory)}")

    async def load_weights(self, directory: Path) -> None:
        """Replace all weights by those of a model directory, and drop what was computed with the old ones."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        for path, given in ((CALL, body), *((path, None) for path in RESETS)):
            reply = await self._request("POST", path, given, WEIGHTS_SECONDS)
            if reply.status in (404, 405):
                raise EnvironmentProblem(
                    f"{self.url}: has no {path}, which replaces all weights; start it with {DEV_MODE}=1 in its "
                    "environment, where only the trainer can reach its port, because this path asks for no key; or "
                    "add the section lora"
                )
            if reply.status >= 400:
                raise EnvironmentProblem(f"{self.url}: refuses the weights {directory}: {_message(reply)}")
            if path in RESETS and "false" in reply.text():  # {"success": false}
                raise ServerFault(f"{path}: it has other requests, which hold results of the old weights")

    async def unload(self, name: str) -> None:
        """Unload an adapter, if it is loaded."""
        await self._request("POST", UNLOAD, {"lora_name": name}, ADAPTER_SECONDS)

    async def complete(self, path: str, body: dict[str, Any], most_bytes: int = SHORT_ANSWER) -> Completions:
        """Request completions at a path and return the answer, which may have at most `most_bytes`."""
        reply = await self._request("POST", path, body, self._seconds, most_bytes)
        if reply.status == 404 and "does not exist" in _message(reply):
            raise AdapterMissing(f"it does not know {body['model']}")
        if reply.status in (403, 404) and path == GENERATE:
            raise EnvironmentProblem(
                f"{self.url}: has no {GENERATE}, which is needed to sample several turns or parts and to ask teachers; "
                "start vLLM 0.32 or newer with --enable-scale-out"
            )
        if reply.status >= 400:
            raise EnvironmentProblem(f"{self.url}: {_completion_advice(_message(reply))}")
        return _read(path, reply, Completions)

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None, seconds: float, most_bytes: int = SHORT_ANSWER
    ) -> HttpReply:
        request = self._client.build_request(method, path, json=body)
        try:
            reply = await ask(self._client, request, seconds=seconds, most_bytes=most_bytes)
        except NoAnswer as error:
            raise ServerFault(f"{path}: {error}") from error
        except WrongAnswer as error:
            raise InvalidAnswer(f"{path}: {error}") from error
        if reply.status == 401 or (reply.status == 403 and path != GENERATE):  # 403: vLLM has no such path
            raise EnvironmentProblem(
                f"{self.url}: refuses the key ({reply.status}); set {KEY_VARIABLE} to the server's --api-key"
            )
        is_refusal = 400 <= reply.status < 500 and reply.status != 429
        is_verdict = path == LOAD and reply.status >= 500 and _refuses_adapter(_message(reply))
        if reply.status != 200 and not is_refusal and not is_verdict:
            raise ServerFault(f"{path}: {reply.status} {_message(reply)}")
        return reply


def _read(path: str, reply: HttpReply, form: type[AnswerType]) -> AnswerType:
    try:
        return reply.read(form)
    except NoAnswer as error:
        raise ServerFault(f"{path}: {error}") from error
    except WrongAnswer as error:
        raise InvalidAnswer(f"{path}: {error}") from error


def _message(reply: HttpReply) -> str:
    """Return the server's error message, or the beginning of the body if it is not an error of vLLM."""
    try:
        words = reply.read(Refusal).words()
    except (NoAnswer, WrongAnswer):
        words = None
    return reply.text() if words is None else redact(words)[:LONGEST_MESSAGE]


def _refuses_adapter(message: str) -> bool:
    """Return whether vLLM says that it will never accept this adapter, for which it may answer 500."""
    return any(words in message for words in ("max_lora_rank", "not supported", "unsupported", "No adapter found"))


def _load_advice(status: int, message: str, directory: Path) -> str:
    if status in (404, 405) and "adapter" not in message:
        return (
            "cannot load adapters at run time; start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in "
            "its environment"
        )
    if "rank" in message:
        return f"refuses the adapter: {message}; start it with a greater --max-lora-rank"
    if "No adapter found" in message or "not found" in message.lower() or "does not exist" in message:
        return f"does not see {directory}; trainer and server must share the file system that `output` lies on"
    return f"refuses the adapter {directory}: {message}"


def _completion_advice(message: str) -> str:
    if "maximum context length" in message or "max_model_len" in message:
        return f"{message}; start it with a greater --max-model-len"
    if "prompt logprobs" in message and "max allowed" in message:
        return f"{message}; start it with a greater --max-logprobs, or lower the teacher's top_k"
    if "--trust-request-" in message:
        return f"{message}; rows with videos also need --trust-request-mm-kwargs and --trust-request-chat-template"
    if "At most" in message and ("image" in message or "video" in message):
        return f"{message}; start it with a greater --limit-mm-per-prompt"
    return f"refuses a request: {message}"


BACKOFF_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0)
NONSENSE = 3  # invalid answers, with a pause after each, before a server is no longer used


@dataclass(kw_only=True, slots=True)
class ServerFaults:
    """Counts of what went wrong with a server, or with a request."""

    in_a_row: int = 0
    nonsense: int = 0  # invalid answers that are not forgotten
    first: float | None = None  # time.monotonic() of the first one; None before it

    @property
    def are_too_wrong(self) -> bool:
        return self.nonsense >= NONSENSE

    def add(self, fault: ServerFault) -> float:
        """Count a fault. Return the seconds to wait before another attempt."""
        pause = BACKOFF_SECONDS[min(self.in_a_row, len(BACKOFF_SECONDS) - 1)]
        self.in_a_row += 1
        self.nonsense += isinstance(fault, InvalidAnswer)
        if self.first is None:
            self.first = time.monotonic()
        return pause

    def lasted(self, seconds: float) -> bool:
        """Return whether the first fault is at least this many seconds ago."""
        return self.first is not None and time.monotonic() - self.first >= seconds
