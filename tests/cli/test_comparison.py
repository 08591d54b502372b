"""`tiercel runs --compare`: the differences between runs, and their newest numbers."""

import json
from pathlib import Path

import pytest

from tests.web.report.fake_runs import CONFIG, new_run, write_lines
from tiercel.cli.main import main
from tiercel.cli.runs import newest_numbers
from tiercel.web.report.reading import read_run
from tiercel.web.view.compare import MOST_RUNS


@pytest.fixture
def two(tmp_path, monkeypatch) -> list[str]:
    """Two runs: another length, another environment, and a number that only one has."""
    monkeypatch.chdir(tmp_path)
    for name, steps, torch, scale in (("a", 4, "2.9", 1.0), ("b", 2, "2.10", 2.0)):
        new_run(Path(name), CONFIG.replace("STEPS", str(steps)))
        Path(name, "env.json").write_text(json.dumps({"packages": {"torch": torch, "peft": "1"}}))
        rows = [{"step": step, "reward/mean": scale * step / 10, "loss": 0.5} for step in range(1, steps + 1)]
        rows[-1] |= {"eval/reward/mean": scale / 4}
        if name == "b":
            rows = [{**row, "turns/mean": 2.0} for row in rows]
        write_lines(Path(name, "metrics.jsonl"), rows)
    return ["a", "b"]


def test_what_differs_and_the_newest_numbers(two, capsys):
    assert main(["runs", "--compare", *two, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"] == two and found["recipe"] == {"train.steps": [4, 2]}
    assert found["environment"] == {"packages.torch": ["2.9", "2.10"]}
    newest = found["newest"]
    assert newest["Reward"] == pytest.approx([0.35, 0.4]) and newest["Loss"] == [0.5, 0.5]  # the mean of half the steps
    assert newest["Reward, held out"] == [0.25, 0.5] and newest["Turns per completion"] == [None, 2.0]


def test_the_tables(two, capsys):
    assert main(["runs", "--compare", *two]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("a: GRPO") and lines[1].startswith("b: GRPO")
    cells = [line.split() for line in lines]
    assert ["train.steps", "4", "2"] in cells and ["packages.torch", "2.9", "2.10"] in cells
    assert ["Turns", "per", "completion", "\u2013", "2.00"] in cells


def test_runs_that_are_equal_differ_in_nothing(two, capsys):
    assert main(["runs", "--compare", "a", "a"]) == 0
    assert "what differs in the recipe: nothing" in capsys.readouterr().out


def test_three_runs(two):
    assert newest_numbers([read_run(Path(name)) for name in ("b", "a", "b")])["Reward"] == pytest.approx(
        [0.4, 0.35, 0.4]
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["a"], "got 1 runs"),
        (["a"] * (MOST_RUNS + 1), f"from 2 to {MOST_RUNS}"),
        (["a", "c"], "c is not a run"),
    ],
)
def test_what_cannot_be_compared_is_refused(two, given, said, capsys):
    assert main(["runs", "--compare", *given]) == 2
    assert said in capsys.readouterr().err
