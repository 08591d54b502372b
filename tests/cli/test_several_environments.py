"""Several environments through every command that reads a recipe."""

import json
from pathlib import Path

import pytest

from tests.cli.test_turns import SHOW
from tests.training.test_loops import grpo_recipe, write_rows
from tiercel.cli.main import main
from tiercel.config import recipe_to_yaml

TELL = """
class Tell:
    def reset(self, environment, **row):
        self.turns = 0
        return f" This is {environment}."

    def respond(self, completion: str):
        self.turns += 1
        return "Told."

    def get_reward(self) -> float:
        return 1.0
"""


@pytest.fixture(scope="module")
def recipe(tiny_checkpoints, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("several")
    rows = write_rows(root, 13)
    (root / "show.py").write_text(SHOW)
    (root / "tell.py").write_text(TELL)
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    for number, row in enumerate(written):
        row["environment"] = ("show", "tell")[number % 2] if number < 12 else "shop"
    rows.write_text("".join(json.dumps(row) + "\n" for row in written))
    made = grpo_recipe(
        tiny_checkpoints["qwen2_5_vl"],
        rows,
        root / "run",
        data={"max_bad_fraction": 0.5},
        rewards=[{"name": "environment"}],
        learner={"max_tokens_per_microbatch": 1200},
        rollout={
            "environment": {"show": f"{root}/show.py:Show", "tell": f"{root}/tell.py:Tell"},
            "max_turns": 2,
            "max_new_tokens": 12,
            "max_trajectory_tokens": 150,
            "stop": ["e", "a"],
        },
    )
    (root / "recipe.yaml").write_text(recipe_to_yaml(made))
    return root / "recipe.yaml"


def test_check_begins_a_trajectory_in_each_and_names_the_row_without_one(recipe, capsys):
    assert main(["check", str(recipe)]) == 0
    said = capsys.readouterr().out
    assert "tools of show: none" in said and "tools of tell: none" in said
    assert "environment tell: answers a made-up completion of row row-1" in said
    assert "(row-12) environment: is 'shop', which is not a name in rollout.environment; use show or tell" in said


def test_check_needs_rows_that_name_an_environment(recipe, capsys):
    assert main(["check", str(recipe), "data.max_bad_fraction=0"]) == 2
    assert "use show or tell" in "".join(capsys.readouterr())


def test_a_run_answers_each_row_by_its_own_environment(recipe, capsys):
    run = recipe.parent / "run"
    assert main(["grpo", str(recipe)]) == 0
    rejected = [json.loads(line) for line in (run / "bad_rows.jsonl").read_text().splitlines()]
    assert {(row["id"], row["field"]) for row in rejected} == {("row-12", "environment")}
    groups = [json.loads(line) for file in (run / "rollouts").iterdir() for line in file.read_text().splitlines()]
    for group in groups:
        number = int(group["id"].partition("-")[2])
        answers = [turn["answer"] for each in group["completions"] for turn in each["turns"] if turn["answer"]]
        assert answers and all(answer.startswith("Look " if number % 2 == 0 else "Told.") for answer in answers)
    assert len({int(group["id"].partition("-")[2]) % 2 for group in groups}) == 2
    capsys.readouterr()
    assert main(["predict", str(run), "Where?", "--max-new-tokens", "9", "--environment", "tell"]) == 0
    assert main(["predict", str(run), "Where?", "--max-new-tokens", "9"]) == 2
    assert "does not name an environment; use show or tell" in capsys.readouterr().err
