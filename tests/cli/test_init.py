"""`tiercel init`: its recipes pass the check, from flags and from answers."""

import io
import json
import math
from argparse import Namespace
from pathlib import Path

import pytest

from tests.training.test_loops import write_rows
from tiercel.cli import init
from tiercel.cli.main import main
from tiercel.config import load_recipe
from tiercel.config.loading import read_tree
from tiercel.training.run_length import run_length

ROOT = Path(__file__).parents[2]


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


def write_named(rows: Path, *paths: str) -> Path:
    """Write rows in LLaVA's form that name these pictures."""
    turns = [{"from": "human", "value": "<image>What?"}, {"from": "gpt", "value": "1"}]
    lines = [{"id": str(number), "image": path, "conversations": turns} for number, path in enumerate(paths)]
    rows.parent.mkdir(exist_ok=True)
    rows.write_text(json.dumps(lines))
    return rows


@pytest.mark.parametrize(
    ("place", "folder"),
    [("a.png", "."), ("rows/images/a.png", "rows/images"), ("rows/a.png", None), ("far/a.png", "far")],
)
def test_pictures_that_are_not_beside_the_rows_are_looked_for(tmp_path, monkeypatch, capsys, place, folder):
    monkeypatch.chdir(tmp_path)
    rows = write_named(tmp_path / "rows/llava.json", "lost.png", "a.png")
    picture = tmp_path / place
    picture.parent.mkdir(parents=True, exist_ok=True)
    picture.touch()
    stdin = io.StringIO("elsewhere\nfar\n")
    stdin.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", io.StringIO("") if folder != "far" else stdin)
    given = ["--model", "org/m", "--method", "sft", "--gpu", "none", "--output", "runs/x"]
    assert main(["init", "--data", str(rows), *given]) == 0
    root = read_tree("recipe.yaml")["data"].get("image_root")
    assert root is folder is None or Path(root).resolve() == (tmp_path / folder).resolve()
    assert ("elsewhere does not contain lost.png" in capsys.readouterr().err) == (folder == "far")


def test_pictures_of_parts_are_looked_for_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What?"}]
    Path("trl.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": parts}], "answer": "1"}))
    Path("images").mkdir()
    Path("images/a.png").touch()
    assert main(["init", "--data", "trl.jsonl"]) == 0
    assert read_tree("recipe.yaml")["data"]["image_root"] == "images"


def test_pictures_that_are_nowhere_are_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    rows = str(write_named(tmp_path / "llava.json", "coco/1.png"))
    assert main(["init", "--data", rows]) == 2
    assert "--images: is required, because coco/1.png was not found" in capsys.readouterr().err
    assert main(["init", "--data", rows, "--images", str(tmp_path)]) == 2
    assert "does not contain coco/1.png" in capsys.readouterr().err and not Path("recipe.yaml").exists()


@pytest.mark.parametrize(
    ("count", "held", "size"),
    [
        (1, None, 1),
        (2, {"count": 1}, 1),
        (12, {"count": 2}, 2),  # 5 steps of 2
        (19, {"count": 1}, 3),  # 6 of 3
        (40, {"count": 4}, 9),  # 4 of 9
        (99, {"count": 9}, 15),  # 6 of 15
        (100, {"fraction": 0.05}, 16),
    ],
)
def test_the_size_of_a_step_fits_the_rows(tmp_path, monkeypatch, count, held, size):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    (tmp_path / "a.png").touch()
    assert main(["init", "--data", str(write_named(tmp_path / "rows.json", *["a.png"] * count))]) == 0
    tree = read_tree("recipe.yaml")
    assert tree["data"].get("eval") == held and tree["optim"]["prompts_per_step"] == size
    recipe = load_recipe("grpo", "recipe.yaml")
    assert run_length(recipe, 90).steps == math.ceil(90 / size)
    assert load_recipe("grpo", "recipe.yaml", ["train.steps=1"]).train.steps == 1


def test_rows_of_several_files_and_parts_of_them_are_counted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    (tmp_path / "a.png").touch()
    for number in range(3):
        write_named(tmp_path / f"rows-{number}.json", *["a.png"] * 20)
    for data, held, size in (("rows-*.json", 4, 14), ("rows-1.json#12", 2, 2)):
        Path("recipe.yaml").unlink(missing_ok=True)
        assert main(["init", "--data", data]) == 0
        tree = read_tree("recipe.yaml")
        assert tree["data"]["eval"] == {"count": held} and tree["optim"]["prompts_per_step"] == size


def test_the_command_asks_from_five_to_seven_questions():
    assert [question.flag for question in init.QUESTIONS if not question.method and question.flag != "images"] == [
        "model", "data", "method", "gpu", "output",
    ]  # fmt: skip
    assert len(init.QUESTIONS) == 7
    assert (
        "asks five to seven questions" in (ROOT / "README.md").read_text()
        and "问五到七个问题" in (ROOT / "README.zh-CN.md").read_text()
    )


def test_a_folder_that_is_missing_is_named_before_anything_is_asked(rows, tmp_path, capsys):
    file = tmp_path / "recipes" / "mine.yaml"
    assert main(["init", "--data", str(rows), "--file", str(file)]) == 2
    assert f"{file.parent} is not a directory" in capsys.readouterr().err


def test_a_recipe_that_is_there_stays(rows, capsys):
    Path("recipe.yaml").write_text("mine")
    assert main(["init", "--data", str(rows)]) == 2
    assert Path("recipe.yaml").read_text() == "mine" and "--file" in capsys.readouterr().err


def test_only_grpo_is_asked_for_its_task():
    asked = []

    def ask(question: init.RecipeQuestion) -> str:
        asked.append(question.flag)
        return question.usual or "x"

    flags = dict.fromkeys(("model", "data", "images", "task", "gpu", "output"))
    init.answers(Namespace(method="sft", **flags), ask)
    assert asked == ["model", "data", "gpu", "output"]
