"""A run uploaded to a hub, which runs on this machine."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from tests.training.test_loops import run_offline, sft_recipe, write_rows
from tiercel.cli.main import main
from tiercel.errors import EnvironmentProblem
from tiercel.inference_and_export.push import push


class Hub(BaseHTTPRequestHandler):
    """As much of the hub's interface as an upload of small files uses."""

    protocol_version = "HTTP/1.1"
    refuses = False
    is_private: bool | None = None  # of a repository that was there before
    created: list
    files: dict

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b"".join(self._chunks())
        if self.refuses:
            return self._answer({"error": "Invalid username or password."}, 401)
        if self.path == "/api/repos/create":
            self.created.append({**json.loads(body), "token": self.headers["Authorization"]})
            return self._answer({"url": f"http://{self.headers['Host']}/me/cup", "id": "me/cup"})
        if "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            kinds = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
            return self._answer({"files": kinds})
        if "/commit/" in self.path:
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                if entry["key"] == "deletedFile":
                    del self.files[entry["value"]["path"]]
            commit = f"http://{self.headers['Host']}/me/cup/commit/{'0' * 40}"
            return self._answer({"commitUrl": commit, "commitOid": "0" * 40, "success": True})
        return self._answer({})

    def do_GET(self) -> None:
        if "/me/cup" not in self.path:
            return self._answer({"error": "not found"}, 404)
        if "/tree/" in self.path:
            return self._answer([{"type": "file", "path": name, "oid": "0" * 40, "size": 1} for name in self.files])
        private = any(map(is_private, self.created)) if self.is_private is None else self.is_private
        return self._answer({"id": "me/cup", "sha": "0" * 40, "siblings": [], "private": private})

    def _chunks(self):
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _answer(self, values: dict | list, code: int = 200) -> None:
        data = json.dumps(values).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch):
    kind = type("OneHub", (Hub,), {"created": [], "files": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_secretofthistest")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # other tests are offline
    yield kind
    server.shutdown()
    server.server_close()
    thread.join(10)


def is_private(created: dict) -> bool:
    return created.get("private", created.get("visibility") == "private")


@pytest.fixture
def recipe(tiny_checkpoints, tmp_path):
    return sft_recipe(tiny_checkpoints["qwen2_5_vl"], write_rows(tmp_path), tmp_path / "run")


@pytest.mark.parametrize("merge, weights", [(True, "model.safetensors"), (False, "adapter_model.safetensors")])
def test_a_run_is_sent_with_a_card(hub, recipe, merge, weights):
    run = run_offline(recipe)
    assert push(recipe, run, "cup", merge=merge).endswith("me/cup")  # of the user of the token
    (created,) = hub.created
    assert is_private(created) and created["token"] == "Bearer hf_secretofthistest"
    assert weights in hub.files and "README.md" in hub.files
    card = hub.files["README.md"].decode()
    head = yaml.safe_load(card.split("---")[1])
    assert head["library_name"] == ("transformers" if merge else "peft") and {"tiercel", "sft", "lora"} <= {
        *head["tags"]
    }
    assert "base_model" not in head  # a folder of this machine
    assert "| step | eval/loss | loss |" in card and "| 3 |" in card and "lr: 0.01" in card and "torch" in card
    assert "hf_secret" not in card


def test_the_command_sends_it_too(hub, recipe, capsys):
    run = run_offline(recipe)
    assert main(["export", str(run), "--adapter", "--push", "me/cup", "--public"]) == 0
    assert not is_private(hub.created[0]) and "me/cup" in capsys.readouterr().out
    assert main(["export", str(run), "--adapter", "--public"]) == 2


def test_weights_of_an_earlier_upload_go(hub, recipe):
    run = run_offline(recipe)
    left = {"notes.md": b"", "other/model.safetensors": b"", "other/adapter_config.json": b""}
    hub.files |= {"adapter_config.json": b"", "model.safetensors.index.json": b"", **left}
    push(recipe, run, "me/cup", merge=True)
    assert {"config.json", "model.safetensors", *left} <= {*hub.files}
    assert not {"adapter_config.json", "model.safetensors.index.json"} & {*hub.files}


@pytest.mark.parametrize("public", (True, False))
def test_a_repository_of_before_is_as_visible_as_the_command_wants(hub, recipe, public):
    run = run_offline(recipe)
    hub.is_private = public
    with pytest.raises(EnvironmentProblem, match=r"^me/cup exists and is"):
        push(recipe, run, "me/cup", merge=False, public=public)
    assert not hub.files


def test_a_hub_that_refuses_is_told(hub, recipe):
    run = run_offline(recipe)
    hub.refuses = True
    with pytest.raises(EnvironmentProblem, match="me/cup cannot be pushed"):
        push(recipe, run, "me/cup", merge=False)
