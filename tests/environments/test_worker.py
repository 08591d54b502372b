"""What the process of an environment answers, tested without the process."""

from dataclasses import dataclass
from typing import Any

import pytest
from PIL import Image

from tiercel.environments.worker import Host, _load
from tiercel.user_functions import CannotLoad


class Env:
    done = False

    def reset(self, **row: Any):
        self.row = row

    def act(self, x: int = 0):
        return x

    def _hidden(self): ...

    def respond(self, completion):
        return None if completion == "stop" else completion

    def get_reward(self): ...


@dataclass
class Ask:
    """Asks a host as a process does."""

    host: Host

    def __call__(self, ask, **fields):
        replies = []
        self.host.handle({"number": 3, "ask": ask, "fields": fields}, lambda **reply: replies.append(reply))
        (reply,) = replies
        assert reply.pop("number") == 3
        return reply


def ask_of(environment, *functions):
    return Ask(Host(environment, list(functions)))


def test_public_methods_and_functions_are_tools():
    def lookup(): ...

    assert [tool.__name__ for tool in Host(Env(), [lookup]).tools] == ["lookup", "act"]
    assert Host(None, []).tools == []


def test_reset_gets_what_it_names():
    row = {"id": "r", "answer": 7}
    ask = ask_of(Env())
    assert ask("reset", row=row, seed=5) == {"parts": None, "is_done": False}
    assert ask.host.environment.row == row  # the seed only if the method names it

    class Named(Env):
        def reset(self, answer, seed):
            self.row = (answer, seed)

    class Both(Env):
        def reset(self, seed, **row):
            self.row = (seed, row)

    class Missing(Env):
        def reset(self, level):
            pass

    for kind, seen in ((Named, (7, 5)), (Both, (5, row))):
        ask = ask_of(kind())
        ask("reset", row=row, seed=5)
        assert ask.host.environment.row == seen
    ask = ask_of(Named())
    ask("reset", row={**row, "seed": 1}, seed=5)
    assert ask.host.environment.row == (7, 1)  # the row's own column
    assert "missing 1 required positional argument: 'level'" in ask_of(Missing())("reset", row=row, seed=5)["failure"]


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        ("text", ["text"]),
        (None, ["None"]),
        (3, ["3"]),
        ({"a": 1}, ["{'a': 1}"]),
        ([1, 2], ["[1, 2]"]),
        ([], ["[]"]),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": 3}], ["a", "3"]),
    ],
)
def test_answers_become_parts(value, texts):
    reply = ask_of(Env())("call", name="act", arguments={"x": value})
    assert reply == {"parts": [{"text": text} for text in texts], "is_done": False}


def test_pictures_are_files_in_base64():
    picture = Image.new("RGB", (2, 1))
    for value in (picture, [{"type": "image", "image": picture}]):
        (part,) = ask_of(Env())("call", name="act", arguments={"x": value})["parts"]
        assert part["image"].startswith("iVBORw0KGgo")  # of a PNG
    assert ask_of(Env())("call", name="act", arguments={"x": b"file"})["parts"] == [{"image": "ZmlsZQ=="}]
    wrong = ask_of(Env())("call", name="act", arguments={"x": [{"type": "image", "image": "a.png"}]})
    assert wrong["failure"].startswith("answered a str as a picture; give a PIL image")


def test_what_a_tool_raises_is_an_answer_and_what_ends_a_program_is_a_failure():
    class Raises(Env):
        done = True

        def act(self, kind):
            raise {"value": ValueError("odd"), "none": ValueError(), "exit": SystemExit(1)}[kind]

    ask = ask_of(Raises())
    assert ask("call", name="act", arguments={"kind": "value"}) == {"error": "odd", "is_done": True}
    assert ask("call", name="act", arguments={"kind": "none"})["error"] == "ValueError"
    assert ask("call", name="act", arguments={"other": 1})["error"] == "missing a required argument: 'kind'"
    assert "SystemExit: 1" in ask("call", name="act", arguments={"kind": "exit"})["failure"]


def test_done_is_an_attribute_or_a_property():
    class Property(Env):
        @property
        def done(self):
            return self.row["id"] == "last"

    class Method(Env):
        def done(self): ...

    ask = ask_of(Property())
    assert [ask("reset", row={"id": name}, seed=0)["is_done"] for name in ("first", "last")] == [False, True]
    assert ask_of(Method())("respond", completion="x") == {"parts": [{"text": "x"}], "is_done": False}
    assert ask_of(Env())("respond", completion="stop")["parts"] is None


@pytest.mark.parametrize(
    ("environment", "functions", "reason"),
    [
        ("Missing", [], "has no function Missing; its functions are: function, Needs"),
        ("function", [], "function is no class with a method reset"),
        ("WithoutReset", [], "WithoutReset is no class with a method reset"),
        ("Needs", [], "Needs cannot be"),
        (None, ["Needs"], "Needs is no function"),
    ],
)
def test_what_cannot_be_loaded_is_named(write, environment, functions, reason):
    path = write("""
        def function(): ...
        class WithoutReset: ...
        class Needs:
            def __init__(self, x): ...
            def reset(self, **row): ...
        """)
    named = None if environment is None else f"{path}:{environment}"
    with pytest.raises(CannotLoad) as caught:
        _load(named, [f"{path}:{name}" for name in functions])
    assert reason in str(caught.value)


def test_a_file_is_imported_once(write):
    path = write("class Env:\n    def reset(self): ...\ndef kind(): return Env\n")
    handle = _load(f"{path}:Env", [f"{path}:kind"])
    host = handle.__self__
    assert host.tools[0]() is type(host.environment)
