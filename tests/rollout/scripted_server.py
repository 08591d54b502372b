"""A small HTTP server that speaks as much of vLLM's protocol as the client uses, and fails as a test requires."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = dict[str, Any]
END_TOKEN = "<|im_end|>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Raw:
    """An answer to the byte."""

    body: bytes = b""
    status: int = 200
    headers: tuple[tuple[str, str], ...] = (("Content-Type", "application/json"),)
    promised: int = 0  # bytes beyond the body that the header announces
    pause: float = 0.0  # seconds before each byte
    wire: bytes | None = None  # what is written in place of all this


class ScriptedServer:
    """`faults` are taken one for each completion request, until there are none. `tamper` makes of every good answer to
    a completion what is sent, `tamper_models` the same for /v1/models."""

    def __init__(self, prompt_ids: Callable[[list[Any]], list[int]], end_id: int):
        self.prompt_ids = prompt_ids
        self.end_id = end_id
        self.adapters: dict[str, str] = {}
        self.loads: list[str] = []
        self.requests: list[Answer] = []
        self.faults: list[str] = []
        self.load_refusal: tuple[int, str] | None = None
        self.max_model_len = 4096
        self.model_root = "models/base"
        self.key: str | None = None
        self.gives_raw_logprobs = False
        self.tamper: Callable[[Answer], Raw] | None = None
        self.tamper_models: Callable[[Answer], Raw] | None = None
        self.hang_seconds = 3.0
        self.lock = threading.Lock()
        self.url = ""

    def completion(self, body: Answer) -> Answer:
        """The same request always gets the same answer."""
        only = body.get("allowed_token_ids")
        choices = []
        for number in range(body["n"]):
            ids = only or [5 + (body["seed"] + number) % 7, self.end_id]
            logprob = 0.0 if only and not self.gives_raw_logprobs else -0.5
            content = [{"token": "x", "logprob": logprob} for _ in ids]
            choices.append(
                {"index": number, "finish_reason": "stop", "token_ids": ids, "logprobs": {"content": content}}
            )
        return {
            "model": body["model"],
            "choices": choices,
            "prompt_token_ids": self.prompt_ids(body["messages"]),
        }


class _Handler(BaseHTTPRequestHandler):
    scripted: ScriptedServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise a body waits 40 ms for the acknowledgement of its headers

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _answer(self, status: int, body: Any, promised: int = 0) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) + promised))
        self.end_headers()
        self.wfile.write(data)

    def _answer_raw(self, raw: Raw) -> None:
        if raw.wire is not None:
            self.wfile.write(raw.wire)
            self.close_connection = True
            return
        self.send_response(raw.status)
        for name, value in (*raw.headers, ("Content-Length", str(len(raw.body) + raw.promised))):
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = raw.promised > 0
        with suppress(OSError):  # the client gives up
            if not raw.pause:
                self.wfile.write(raw.body)
            for number in range(len(raw.body) if raw.pause else 0):
                time.sleep(raw.pause)
                self.wfile.write(raw.body[number : number + 1])
                self.wfile.flush()

    def _is_known(self) -> bool:
        key = self.scripted.key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self._answer(401, {"error": "Unauthorized"})
        return False

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, b"")
        elif self._is_known():
            base = {"id": "base", "root": self.scripted.model_root, "max_model_len": self.scripted.max_model_len}
            answer = {"data": [base, *({"id": name} for name in self.scripted.adapters)]}
            if self.scripted.tamper_models is not None:
                self._answer_raw(self.scripted.tamper_models(answer))
            else:
                self._answer(200, answer)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self._is_known():
            return
        if self.path == "/v1/load_lora_adapter":
            self._load(body)
        elif self.path == "/v1/unload_lora_adapter":
            self.scripted.adapters.pop(body["lora_name"], None)
            self._answer(200, b"done")
        else:
            self._complete(body)

    def _load(self, body: Answer) -> None:
        scripted = self.scripted
        if scripted.load_refusal is not None:
            status, message = scripted.load_refusal
            self._answer(status, {"error": {"message": message}})
            return
        scripted.loads.append(body["lora_name"])
        scripted.adapters[body["lora_name"]] = body["lora_path"]
        self._answer(200, b"done")

    def _complete(self, body: Answer) -> None:
        scripted = self.scripted
        with scripted.lock:
            scripted.requests.append(body)
            fault = scripted.faults.pop(0) if scripted.faults else None
        if fault == "restarted":
            scripted.adapters.clear()
        if body["model"] not in scripted.adapters:
            self._answer(404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
            return
        answer = scripted.completion(body)
        if fault == "500":
            self._answer(500, {"error": {"message": "EngineCore encountered an issue"}})
        elif fault == "drops":
            self._answer(200, json.dumps(answer).encode()[:40], promised=4000)
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif fault == "hangs":
            time.sleep(scripted.hang_seconds)
            self.close_connection = True
        elif fault == "fewer":
            self._answer(200, answer | {"choices": answer["choices"][:-1]})
        elif fault == "nonsense":
            self._answer(200, b"<html>")
        elif fault == "other policy":
            self._answer(200, answer | {"model": "policy-other-7-00000000"})
        elif fault == "aborts":
            self._answer(200, answer | {"choices": [c | {"finish_reason": "abort"} for c in answer["choices"]]})
        elif scripted.tamper is not None and "allowed_token_ids" not in body:
            self._answer_raw(scripted.tamper(answer))
        else:
            self._answer(200, answer)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.connections: list[socket.socket] = []

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has given up is part of the script."""

    def drop_connections(self) -> None:
        """What a killed process leaves of them."""
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def serving(scripted: ScriptedServer, port: int = 0) -> Iterator[ScriptedServer]:
    """Serve on 127.0.0.1 inside; afterwards the port refuses."""
    handler = type("Handler", (_Handler,), {"scripted": scripted})
    server = _Server(("127.0.0.1", port), handler)
    scripted.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield scripted
    finally:
        server.shutdown()
        server.server_close()
        server.drop_connections()
        thread.join()
