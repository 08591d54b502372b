"""Functions of a session, as files that work on their own."""

import json
import linecache
import re
from collections import Counter
from enum import IntEnum
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from tiercel.api.functions import named_function, written_function

SESSION = """
import json
import math as m
import re
import urllib.parse
import xml.dom.minidom
from collections import Counter
from typing import List, Optional

LIMIT = 3
WORDS = ("red", "green")
PATTERN = re.compile(r"\\d+", re.IGNORECASE)
CONNECTION = object()

class Judge:
    def grade(self, text):
        return helper(text) + LIMIT

def helper(text):
    return m.floor(len(Counter(text)))

def right(completion, answer="red"):
    found = json.loads("[1]")[0] + len(PATTERN.findall(completion))
    return Judge().grade(completion) + found if answer in WORDS else countdown(2)

def countdown(number):
    return 0 if number == 0 else countdown(number - 1)

def asks(completion):
    return CONNECTION

def round(number):
    return int(number + 0.5)

def rounded(completion):
    return round(len(completion) / 2)

def said(texts: List[str], found: Optional[int] = None) -> List[float]:
    CONNECTION = [helper(text) for text in texts]  # not the global object
    other = [shortened(text) for text in texts]
    return [one + two for one, two in zip(CONNECTION, other)]

said.batched = True
shortened = helper

def fetched(completion):
    return urllib.parse.quote(completion) + xml.dom.minidom.__name__

def around(limit):
    def inner(completion):
        return len(completion) > limit
    return inner
"""


@pytest.fixture
def session(tmp_path, monkeypatch) -> dict:
    """The names of a session, whose source is a file as IPython's cells are."""
    file = tmp_path / "cell.py"
    file.write_text(SESSION)
    module = ModuleType("__main__")
    exec(compile(SESSION, str(file), "exec"), module.__dict__)
    return module.__dict__


def test_a_function_brings_what_it_uses(session):
    source, reason = written_function(session["right"])
    assert reason == "" and source is not None
    alone: dict = {"__name__": "a_file"}
    exec(source, alone)
    for text in ("aab 12", "", "1 2 3"):
        assert alone["right"](text) == session["right"](text)
        assert alone["right"](text, "blue") == session["right"](text, "blue") == 0
    assert "asks" not in alone and "around" not in alone


@pytest.mark.parametrize(
    "name, part",
    [("asks", "CONNECTION"), ("inner", "limit"), ("partial", "partial"), ("lambda", "lambda"), ("method", "method")],
)
def test_what_cannot_stand_alone_is_named(session, name, part):
    found = {
        "asks": session["asks"],
        "inner": session["around"](3),
        "partial": partial(session["right"], answer="red"),
        "lambda": lambda completion: 1.0,
        "method": session["Judge"]().grade,
    }[name]
    source, reason = written_function(found)
    assert source is None and part in reason


@pytest.mark.parametrize("value", (float("inf"), Counter("aab"), IntEnum("Colour", "RED").RED, [float("nan")]))
def test_a_constant_that_repr_does_not_write_as_python_is_named(session, value):
    session["LIMIT"] = value
    source, reason = written_function(session["right"])
    assert source is None and "LIMIT" in reason


def module_function(completion):
    return 1.0


def test_a_helper_that_is_named_like_a_builtin_comes_too(session):
    source, _ = written_function(session["rounded"])
    alone: dict = {"__name__": "a_file"}
    exec(source, alone)
    assert alone["rounded"]("a") == session["rounded"]("a") == 1  # Python's own round(0.5) is 0


def test_annotations_attributes_aliases_and_local_names_come_as_they_are(session):
    source, reason = written_function(session["said"])
    assert reason == "" and "CONNECTION = " in source
    alone: dict = {"__name__": "a_file"}
    exec(source, alone)
    assert alone["said"](["aab"]) == session["said"](["aab"]) == [4] and alone["said"].batched is True


def test_modules_below_a_package_are_imported_by_name(session):
    source, _ = written_function(session["fetched"])
    lines = source.splitlines()
    assert "import urllib.parse" in lines and "import xml.dom.minidom" in lines
    alone: dict = {"__name__": "a_file"}
    exec(source, alone)
    assert alone["fetched"]("a b") == "a%20bxml.dom.minidom"


def test_a_constant_that_holds_a_secret_is_not_written(session, monkeypatch):
    session["LIMIT"] = "sk-" + "a1B2" * 10
    monkeypatch.setenv("JUDGE_API_KEY", session["LIMIT"])
    source, reason = written_function(session["right"])
    assert source is None and "LIMIT" in reason and "a1B2" not in reason


def test_flags_and_names_that_mean_each_other_are_written(session):
    session["FLAGS"] = re.IGNORECASE | re.MULTILINE
    exec(
        compile("def flagged(completion):\n    return len(re.findall('a', completion, FLAGS))\n", "f.py", "exec"),
        session,
    )
    linecache.cache["f.py"] = (
        1,
        None,
        ["def flagged(completion):\n", "    return len(re.findall('a', completion, FLAGS))\n"],
        "f.py",
    )
    source, reason = written_function(session["flagged"])
    alone: dict = {"__name__": "a_file"}
    exec(source or reason, alone)
    assert alone["flagged"]("aA") == 2
    session["shortened"] = session["right"]
    session["right"] = session["helper"]
    source, reason = written_function(session["said"])
    assert source is None and "shortened" in reason


def test_an_attribute_that_cannot_be_written_down_is_named(session):
    session["said"].client = object()
    source, reason = written_function(session["said"])
    assert source is None and "client" in reason


def test_a_function_of_a_module_is_named_there():
    assert named_function(module_function) == f"{__name__}:module_function"
    assert named_function(json.dumps) == "json:dumps" or named_function(json.dumps).endswith("__init__.py:dumps")
    assert named_function(partial(module_function)) is None
    assert named_function(Path("x").exists) is None
    assert named_function(re.compile("x").match) is None
