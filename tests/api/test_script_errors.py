"""What a script prints if an error ends it."""

import runpy
import sys
from pathlib import Path

import pytest

from tiercel.api.script_errors import shorten_errors

WRONG = """
import tiercel.config.loading as loading
def begin():
    loading.recipe_of_tree("sft", {"optim": {"lr": "x"}}, check_paths=False)
begin()
"""
OWN = """
from tiercel.errors import RunError
def act():
    raise KeyError("mine")
try:
    act()
except KeyError as error:
    raise RunError("it failed") from error
"""


def printed_by(script: str, folder: Path, capsys) -> tuple[BaseException, str]:
    (folder / "train.py").write_text(script)
    with pytest.raises(ValueError) as caught:
        runpy.run_path(str(folder / "train.py"))
    sys.excepthook(caught.type, caught.value, caught.tb)
    return caught.value, capsys.readouterr().err


def test_a_script_gets_its_own_lines_and_the_message(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    shorten_errors()
    error, said = printed_by(WRONG, tmp_path, capsys)
    assert "    begin()\n" in said and "    loading.recipe_of_tree(" in said
    assert "in recipe_of_tree" not in said and "in _judge" not in said
    assert said.endswith(f"RecipeError: {error}\n") and "optim.lr" in said
    error, said = printed_by("int('x')\n", tmp_path, capsys)
    assert said.endswith("ValueError: invalid literal for int() with base 10: 'x'\n")


def test_a_cause_in_the_users_code_is_printed_whole(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    shorten_errors()
    _, said = printed_by(OWN, tmp_path, capsys)
    assert "in act" in said and "The above exception was the direct cause" in said and "RunError: it failed" in said
