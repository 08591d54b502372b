"""`tiercel init`: its recipes pass the check, from flags and from answers."""

import io
from argparse import Namespace
from pathlib import Path

import pytest

from tests.training.test_loops import write_rows
from tiercel.cli import init
from tiercel.cli.main import main
from tiercel.config import load_recipe
from tiercel.config.loading import read_tree


@pytest.fixture
def rows(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    return write_rows(tmp_path)


@pytest.mark.parametrize("task", init.TASKS)
def test_every_task_gives_a_valid_recipe(rows, task):
    assert main(["init", "--data", str(rows), "--task", task, "--file", f"{task}.yaml"]) == 0
    recipe = load_recipe("grpo", f"{task}.yaml")
    assert [reward.name for reward in recipe.rewards] == [reward["name"] for reward in init.TASKS[task]]
    assert recipe.model.dtype == "float32" and recipe.output == "runs/first"


@pytest.mark.parametrize("method", init.METHODS)
@pytest.mark.parametrize("gpu, quantize", [("none", None), ("24GB", "nf4"), ("48", None), ("80 GB", None)])
def test_every_method_on_every_card(rows, method, gpu, quantize):
    assert main(["init", "--data", str(rows), "--method", method, "--gpu", gpu]) == 0
    recipe = load_recipe(method, "recipe.yaml")
    assert recipe.model.quantize == quantize
    wanted = {"none": "false", "24GB": "full", "48": "selective", "80 GB": "false"}[gpu]
    assert str(recipe.learner.gradient_checkpointing).lower() == wanted


def test_answers_at_a_terminal(rows, monkeypatch, capsys):
    stdin = io.StringIO(f"org/m\n{rows}\n\nboxes\n\nruns/x\n")
    stdin.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", stdin)
    assert main(["init"]) == 0
    tree = read_tree("recipe.yaml")
    assert tree["model"]["path"] == "org/m" and tree["rewards"] == [{"name": "iou"}] and tree["output"] == "runs/x"
    said = capsys.readouterr()
    assert said.out.splitlines()[0] == "recipe.yaml" and said.err.count(": ") >= 6


def test_what_cannot_be_read_is_asked_again(rows, monkeypatch, capsys):
    stdin = io.StringIO(f"org/m\n\n{rows}\nppo\nSFT\nbig\n24\nruns/x\n")
    stdin.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", stdin)
    assert main(["init"]) == 0
    tree = read_tree("recipe.yaml")
    assert tree["model"]["quantize"] == "nf4" and "rewards" not in tree and tree["output"] == "runs/x"
    said = capsys.readouterr().err
    assert "--method" in said and "--gpu" in said
    monkeypatch.setattr("sys.stdin", stdin)  # nothing is asked if there is no room for the answers
    assert main(["init"]) == 2 and "recipe.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, part",
    [
        ([], "--data"),
        (["--data", "none.jsonl"], "data.train"),
        (["--data", "ROWS", "--method", "ppo"], "--method"),
        (["--data", "ROWS", "--task", "poems"], "--task"),
        (["--data", "ROWS", "--gpu", "big"], "--gpu"),
    ],
)
def test_what_cannot_be_is_told_and_nothing_is_written(rows, capsys, flags, part):
    assert main(["init", *(str(rows) if flag == "ROWS" else flag for flag in flags)]) == 2
    assert part in capsys.readouterr().err and not Path("recipe.yaml").exists()


def test_a_recipe_that_is_there_stays(rows, capsys):
    Path("recipe.yaml").write_text("mine")
    assert main(["init", "--data", str(rows)]) == 2
    assert Path("recipe.yaml").read_text() == "mine" and "--file" in capsys.readouterr().err


def test_only_grpo_is_asked_for_its_task():
    asked = []

    def ask(question: init.RecipeQuestion) -> str:
        asked.append(question.flag)
        return question.usual or "x"

    init.answers(Namespace(model=None, data=None, method="sft", task=None, gpu=None, output=None), ask)
    assert asked == ["model", "data", "gpu", "output"]
