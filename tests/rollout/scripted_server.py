"""A small HTTP server that speaks as much of vLLM's protocol as the client uses, and fails as a test asks."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = dict[str, Any]
END_TOKEN = "<|im_end|>"


class ScriptedServer:
    """`faults` are taken one for each completion request, until there are none."""

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

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _answer(self, status: int, body: Any, promised: int = 0) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) + promised))
        self.end_headers()
        self.wfile.write(data)

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
            self._answer(200, {"data": [base, *({"id": name} for name in self.scripted.adapters)]})

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
            time.sleep(3.0)
            self.close_connection = True
        elif fault == "fewer":
            self._answer(200, answer | {"choices": answer["choices"][:-1]})
        elif fault == "nonsense":
            self._answer(200, b"<html>")
        elif fault == "other policy":
            self._answer(200, answer | {"model": "policy-other-7-00000000"})
        elif fault == "aborts":
            self._answer(200, answer | {"choices": [c | {"finish_reason": "abort"} for c in answer["choices"]]})
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
