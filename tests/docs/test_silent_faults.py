"""The commands of docs/silent-faults.md print what the page says, on inputs that are written here."""

import re
import shlex

import pytest

from tests.docs.pages import DOCS
from tests.docs.silent_faults import write_inputs
from tiercel.cli.main import main

PAGE = (DOCS / "silent-faults.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (\[.+?) \| (.+?) \| (.+?) \| `(tiercel .+?)` \|$", re.MULTILINE)
ROWS = [(said, command) for _, _, said, command in ROW.findall(PAGE)]
CODE = re.compile(r"`([^`]+)`")
PASSED = "check passed"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("silent") / "faults"
    write_inputs(folder)
    return folder


def run(words: list[str], capsys) -> tuple[int, str]:
    code = main(words)
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_every_row_of_the_first_table_has_a_command():
    table = PAGE.partition("## What `tiercel check` refuses")[2].partition("## ")[0]
    assert len(ROWS) == len(re.findall(r"^\| \[", table, re.MULTILINE)) >= 10


@pytest.mark.parametrize("recipe", ("sft.yaml", "grpo.yaml"))
def test_without_the_fault_the_check_passes(folder, recipe, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    code, printed = run(["check", recipe], capsys)
    assert code == 0 and PASSED in printed


@pytest.mark.parametrize(("said", "command"), ROWS, ids=[command for _, command in ROWS])
def test_a_command_says_what_the_page_says(folder, said, command, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    program, *words = shlex.split(command)
    assert program == "tiercel"
    code, printed = run(words, capsys)
    assert (code == 0) == (PASSED in said), printed
    fragments = CODE.findall(said)
    assert fragments and [fragment for fragment in fragments if fragment not in printed] == []


def test_every_row_names_a_public_report():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| reported")]
    assert len(rows) > len(ROWS)
    assert all(
        re.search(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", line.split(" | ")[0]) for line in rows
    )
