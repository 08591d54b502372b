"""Environments on servers of OpenEnv: real ones on loopback, and a fake one that misbehaves."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.environments.test_dialogues import call, play, text_of
from tests.forked import free_port
from tests.rewards.samples import limits
from tiercel.environments.tools import load_toolbox
from tiercel.environments.worker import _load
from tiercel.errors import RecipeError
from tiercel.reward_types import RewardValue
from tiercel.user_functions import CannotLoad, is_openenv

pytestmark = pytest.mark.usefixtures("no_child_left")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("given", "is_one"),
    [
        ("openenv:http://127.0.0.1:8000", True),
        ("openenv:https://games.example/shop/", True),
        ("openenv:127.0.0.1:8000", False),
        ("openenv:http://me:secret@games.example", False),
        ("openenv:http://games.example?x=1", False),
        ("http://127.0.0.1:8000", False),
    ],
)
def test_a_server_is_named_by_its_address_alone(given, is_one):
    assert is_openenv(given) == is_one


def url_of(text: str) -> str:
    return f"openenv:{text}"


@contextmanager
def served(kind: str, log: Path) -> Iterator[str]:
    """A real server of OpenEnv in a process of its own."""
    pytest.importorskip("openenv.core")
    httpx, port = pytest.importorskip("httpx"), free_port()
    words = [sys.executable, "-m", "tests.environments.openenv_server", kind, str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(words, cwd=ROOT, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
                break
            except httpx.HTTPError:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
        yield url_of(f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait(30)


@pytest.fixture(scope="module")
def guessing(tmp_path_factory) -> Iterator[str]:
    with served("guessing", tmp_path_factory.mktemp("openenv") / "log") as server:
        yield server


def test_a_game_on_a_server(guessing, opened, prompt, tool_family):
    toolbox = load_toolbox(guessing, ["zoom"], limits())
    assert toolbox.names == ("zoom", "step") and (toolbox.responds, toolbox.gives_reward) == (False, True)
    parameters = toolbox.schemas[1]["function"]["parameters"]
    assert list(parameters["properties"]) == parameters["required"] == ["number"]
    with opened(guessing, tools=("step",), gives_reward=True) as dialogues:
        (begun,) = dialogues.prompts_of([prompt])
        assert begun.messages[-1].content.endswith('{"text": "Guess, row-1.", "tries": 0}')
        first, second = dialogues.open(begun, [0, 1])  # two sessions
        wrong, right = play(first, call("step", number=3), call("step", number=7))
        assert wrong.turn.answer == '{"text": "wrong", "tries": 1}<image>' and len(wrong.turn.images) == 1
        assert right.observation is None and "right" in right.turn.answer
        assert first.end().outcome == RewardValue(value=0.75)  # -0.25 + 1
        (refused, unread, end) = play(second, call("step", number=12), call("step", digit=7), "no more")
        assert text_of(tool_family, refused.observation).count("error: only digits") == 1
        assert "error: number: Field required; digit: Extra inputs" in text_of(tool_family, unread.observation)
        assert [each.failure is None for each in (*refused.turn.calls, *unread.turn.calls)] == [False, False]
        assert end.observation is None and second.end() == second.end()
        assert second.end().outcome == RewardValue(value=None)  # no step gave a reward


def test_every_sample_of_a_row_begins_alike(guessing):
    from tiercel.environments.openenv import OpenEnv

    server = OpenEnv(guessing)
    (step,) = server.functions()
    found = []
    for row in ({"id": "a"}, {"id": "a"}, {"id": "a", "seed": 4}):
        server.reset(**row)
        found.append(next(n for n in range(10) if "right" in step(number=n)[0]["text"]))
        assert server.done
        assert server.get_reward() == pytest.approx(1 - 0.25 * found[-1])
    assert found[0] == found[1] and found[2] == 4


def test_tools_of_a_server(tmp_path, opened, prompt):
    with served("tools", tmp_path / "log") as server:
        (schema,) = load_toolbox(server, [], limits()).schemas
        assert schema["function"]["name"] == "add" and schema["function"]["description"] == "Add two numbers."
        assert set(schema["function"]["parameters"]["properties"]) == {"a", "b"}
        with opened(server, tools=("add",), gives_reward=True) as dialogues:
            (begun,) = dialogues.prompts_of([prompt])
            assert begun.messages[-1].content == prompt.messages[-1].content  # its reset says nothing
            (dialogue,) = dialogues.open(begun, [0])
            first, second = play(dialogue, call("add", a=1, b=2), call("add", a="x", b=2))
            assert first.turn.answer == "1 + 2 = 3"
            assert "valid integer" in second.turn.calls[0].failure
            assert dialogue.end().outcome == RewardValue(value=None)


def test_a_full_server_is_told(tmp_path, monkeypatch):
    with served("single", tmp_path / "log") as server:
        from tiercel.environments import openenv

        monkeypatch.setattr(openenv, "WAITS", (0.01,))
        first, second = openenv.OpenEnv(server), openenv.OpenEnv(server)
        first.reset(id="a")
        with pytest.raises(openenv.OpenEnvFailure, match=r"(?s)in 2 tries: .*CAPACITY_REACHED.*max_concurrent_envs"):
            second.reset(id="a")
        first.get_reward()  # ends the session
        second.reset(id="a")
        second.get_reward()


@pytest.fixture
def fake(monkeypatch) -> Iterator[Callable[..., str]]:
    """Start servers that answer /schema with an action and all else as they are told."""
    pytest.importorskip("websockets")
    from tiercel.environments import openenv

    monkeypatch.setattr(openenv, "WAITS", (0.01, 0.01))
    servers: list[HTTPServer] = []

    def start(status: int, headers: dict[str, str], body: Any) -> str:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                asked.append(self.path)  # before the answer, which ends the test's wait
                is_schema = self.path == "/schema"
                action = {"type": "object", "properties": {"x": {"type": "integer"}}}
                written = json.dumps({"action": action} if is_schema else body).encode()
                self.send_response(200 if is_schema else status)
                for name, value in {"Content-Length": str(len(written)), **({} if is_schema else headers)}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(written)
                self.close_connection = True

            def log_message(self, *_: Any) -> None: ...

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        looks = {"poll_interval": 0.02}
        threading.Thread(target=servers[-1].serve_forever, kwargs=looks, daemon=True).start()
        return url_of(f"http://127.0.0.1:{servers[-1].server_port}")

    asked: list[str] = []
    start.asked = asked  # type: ignore[attr-defined]
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_redirection_is_not_followed(fake):
    from tiercel.environments.openenv import OpenEnv, OpenEnvFailure

    other = fake(200, {}, "another host")
    server = OpenEnv(fake(302, {"Location": f"ws{other.removeprefix('openenv:http')}/elsewhere"}, ""))
    with pytest.raises(OpenEnvFailure, match="began no session in 3 tries"):
        server.reset(id="a")
    assert fake.asked == ["/schema", "/ws", "/ws", "/ws"]


def test_a_server_that_is_away_refuses_the_recipe():
    pytest.importorskip("websockets")
    away = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RecipeError) as problem:
        load_toolbox(url_of(away), [], limits())
    assert f"rollout.environment: {away}/schema is no answer of an OpenEnv server" in problem.value.problems[0]


def test_without_its_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "websockets.sync.client", None)
    monkeypatch.delitem(sys.modules, "tiercel.environments.openenv", raising=False)
    with pytest.raises(CannotLoad, match=r"pip install 'tiercel\[openenv\]'"):
        _load(url_of("http://127.0.0.1:1"), [])
