"""The examples of docs/algorithms.md, written as a user would, in a folder outside the package."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.faults.fault_plan import Fault, planning
from tests.training.test_loops import grpo_recipe, write_rows
from tiercel.cli.main import main
from tiercel.config import recipe_to_yaml
from tiercel.distributed.agreement import facts

DOCUMENT = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
LOSS, ADVANTAGE = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
OWN = {"loss": {"call": "research.py:near"}, "advantage": {"call": "research.py:by_median"}}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory, with rows and a file that holds both examples."""
    write_rows(tmp_path)
    (tmp_path / "research.py").write_text(f"{ADVANTAGE}\n\n{LOSS}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_recipe(folder: Path, checkpoint: Path, **changes) -> str:
    defaults = {
        "algorithm": OWN,
        "data": {"eval": None, "workers": 0},
        "train": {"steps": 2, "save_every": 2, "threads": 1, "epochs": None},
        "optim": {"minibatches": 2},
    }
    recipe = grpo_recipe(checkpoint, folder / "rows.jsonl", folder / "run", **(defaults | changes))
    (folder / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    return str(folder / "recipe.yaml")


def read_rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def test_both_examples_are_checked_planned_and_train(tiny_checkpoints, folder, capsys):
    recipe = write_recipe(folder, tiny_checkpoints["qwen2_5_vl"])
    assert main(["check", recipe]) == 0
    said = capsys.readouterr().out
    assert "algorithm.loss.call: research.py:near takes made-up tokens" in said
    assert "algorithm.advantage.call: research.py:by_median takes made-up rewards" in said
    assert main(["plan", recipe, "learner.compile=false"]) == 0
    assert main(["grpo", recipe]) == 0
    rows = read_rows(folder)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["grad_norm"] > 0 and "loss/far_fraction" in row for row in rows)
    assert all("clip/low_fraction" not in row for row in rows)
    lines = (folder / "run/rollouts/step-000001.jsonl").read_text().splitlines()
    for group in map(json.loads, lines):
        totals = sorted(each["total"] for each in group["completions"])
        for each in group["completions"]:
            assert each["advantage"] == pytest.approx(each["total"] - totals[1], abs=1e-6)
    assert main(["report", str(folder / "run")]) == 0
    assert main(["grpo", recipe, "algorithm.loss=grpo"]) == 2
    assert "algorithm.loss: was None, is 'grpo' now" in capsys.readouterr().err
    (folder / "research.py").unlink()
    assert main(["predict", str(folder / "run"), "Where?", "--max-new-tokens", "2"]) == 0  # this needs neither


def test_a_replay_computes_the_loss_of_the_users_own(tiny_checkpoints, folder, capsys):
    recipe = write_recipe(folder, tiny_checkpoints["qwen2_5_vl"], optim={})
    with planning([Fault(site="loss", kind="nan", step=1)]):
        assert main(["grpo", recipe]) == 3
    assert main(["replay", str(folder / "run")]) == 0
    assert "are finite here" in capsys.readouterr().out


def test_a_fault_of_the_function_ends_the_run_with_its_line(tiny_checkpoints, folder, capsys):
    (folder / "faulty.py").write_text("def loss(batch):\n    return batch.logprobs\n")
    recipe = write_recipe(folder, tiny_checkpoints["qwen2_5_vl"], algorithm={"loss": {"call": "faulty.py:loss"}})
    for command in ("check", "grpo"):
        assert main([command, recipe]) == 3
        said = capsys.readouterr().err
        assert "algorithm.loss.call: faulty.py:loss raised AttributeError" in said
        assert "faulty.py:2: return batch.logprobs" in said and "correct the function" in said


def test_a_file_without_the_function_is_refused_before_anything_is_read(tiny_checkpoints, folder, capsys):
    own = {"advantage": {"call": "research.py:by_mean"}}
    recipe = write_recipe(folder, tiny_checkpoints["qwen2_5_vl"], algorithm=own)
    for command in ("check", "grpo"):
        assert main([command, recipe]) == 2
        said = capsys.readouterr().err
        assert "algorithm.advantage.call: research.py has no function by_mean; its functions are: by_median" in said


def test_ranks_compare_the_files(tiny_checkpoints, folder):
    recipe = grpo_recipe(tiny_checkpoints["ovis2"], folder / "rows.jsonl", folder / "run", algorithm=OWN)
    before = facts(recipe)
    (folder / "research.py").write_text(LOSS)
    changed = {name for name, value in facts(recipe).items() if value != before[name]}
    assert changed == {"algorithm.loss.call", "algorithm.advantage.call"}
