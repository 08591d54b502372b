"""One vLLM server over HTTP: its answers, and its failures sorted into those that another attempt may mend and those
that it cannot.

Calls are coroutines, so that one that is given up closes its connection at once.
"""

import json
from pathlib import Path
from typing import Any

import httpx

from tiercel.errors import EnvironmentProblem
from tiercel.reliability.redaction import redact

KEY_VARIABLE = "VLLM_API_KEY"  # vLLM's own name for it
CONNECT_SECONDS = 10.0
HEALTH_SECONDS = 5.0
ADAPTER_SECONDS = 60.0  # to read an adapter and take it in


class ServerFault(Exception):
    """The server did not give a usable answer; another attempt, here or at another server, may get one."""


class AdapterMissing(ServerFault):
    """The server does not know the policy: it was started again, mostly."""


class VllmServer:
    """An unpatched `vllm serve`. Methods raise ServerFault, and EnvironmentProblem for what only its user can mend."""

    def __init__(self, url: str, key: str | None, timeout_seconds: float):
        address = url.rstrip("/").removesuffix("/v1")
        self.url = redact(address)  # as messages name it
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(timeout_seconds, connect=CONNECT_SECONDS, pool=None)
        # A server of this machine or network is asked directly, whatever proxy the environment names.
        self._client = httpx.AsyncClient(
            base_url=address, headers=headers, timeout=timeout, limits=httpx.Limits(), trust_env=False
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def is_healthy(self) -> bool:
        try:
            return (await self._client.get("/health", timeout=HEALTH_SECONDS)).status_code == 200
        except httpx.HTTPError:
            return False

    async def models(self) -> list[dict[str, Any]]:
        """The base model first, then the loaded adapters."""
        answer = self._json(await self._request("GET", "/v1/models", None), "/v1/models")
        models = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(models, list) or not models:
            raise ServerFault("/v1/models lists no model")
        return models

    async def load(self, name: str, directory: Path) -> None:
        """Load an adapter; one of this name that is there already is the same, for the name has its hash."""
        body = {"lora_name": name, "lora_path": str(directory)}
        response = await self._request("POST", "/v1/load_lora_adapter", body, ADAPTER_SECONDS)
        if response.status_code < 400:
            return
        message = _message(response)
        if "already" in message and "loaded" in message:
            return
        raise EnvironmentProblem(f"{self.url}: {_load_advice(response.status_code, message, directory)}")

    async def unload(self, name: str) -> None:
        """Forget an adapter; one that is not there is forgotten already."""
        await self._request("POST", "/v1/unload_lora_adapter", {"lora_name": name}, ADAPTER_SECONDS)

    async def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a chat completion."""
        response = await self._request("POST", "/v1/chat/completions", body)
        if response.status_code == 404 and "does not exist" in _message(response):
            raise AdapterMissing(f"it does not know {body['model']}")
        if response.status_code >= 400:
            raise EnvironmentProblem(f"{self.url}: {_completion_advice(_message(response))}")
        answer = self._json(response, "/v1/chat/completions")
        if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
            raise ServerFault("its answer has no choices")
        return answer

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None, seconds: float | None = None
    ) -> httpx.Response:
        timeout = httpx.USE_CLIENT_DEFAULT if seconds is None else httpx.Timeout(seconds, connect=CONNECT_SECONDS)
        try:
            response = await self._client.request(method, path, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise ServerFault(
                f"{path}: {type(error).__name__}: {error}" if str(error) else type(error).__name__
            ) from error
        if response.status_code in (401, 403):
            raise EnvironmentProblem(
                f"{self.url}: refuses the key ({response.status_code}); set {KEY_VARIABLE} to the server's --api-key"
            )
        is_verdict = path == "/v1/load_lora_adapter" and _refuses_adapter(_message(response))
        if (response.status_code >= 500 and not is_verdict) or response.status_code == 429:
            raise ServerFault(f"{path}: {response.status_code} {redact(_message(response))[:200]}")
        return response

    @staticmethod
    def _json(response: httpx.Response, path: str) -> Any:
        try:
            return response.json()
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ServerFault(f"{path}: answered with something that is not JSON") from error


def _message(response: httpx.Response) -> str:
    """The server's own words."""
    try:
        answer = response.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        return response.text
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _refuses_adapter(message: str) -> bool:
    """vLLM answers 500 for an adapter that it will never take, too."""
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
    if "At most" in message and "image" in message:
        return f"{message}; start it with a greater --limit-mm-per-prompt"
    return f"refuses a request: {message}"
