"""An environment through every command that reads a recipe."""

import json
from pathlib import Path

import pytest

from tests.training.test_loops import grpo_recipe, write_rows
from tiercel.cli.main import main
from tiercel.config import recipe_to_yaml

SHOW = '''
from PIL import Image


def picture(width):
    return {"type": "image", "image": Image.new("RGB", (width, 70), (200, 30, 90))}


class Show:
    """Adds a picture to the prompt, and answers each turn with one whose size follows from what was written."""

    def reset(self, **row):
        self.turns = 0
        return [{"type": "text", "text": "Look."}, picture(60)]

    def respond(self, completion: str):
        self.turns += 1
        return [{"type": "text", "text": f"Look {self.turns} times."}, picture(56 + len(completion) % 40)]

    def get_reward(self) -> float:
        return self.turns / 4
'''
BROKEN = SHOW.replace("return self.turns / 4", 'raise RuntimeError("no board")')


@pytest.fixture(scope="module")
def recipe(tiny_checkpoints, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("turns")
    rows = write_rows(root)
    (root / "show.py").write_text(SHOW)
    (root / "broken.py").write_text(BROKEN)
    written = grpo_recipe(
        tiny_checkpoints["qwen2_5_vl"],
        rows,
        root / "run",
        rewards=[{"name": "environment"}, {"name": "exact"}],
        learner={"max_tokens_per_microbatch": 1200},
        rollout={
            "environment": f"{root}/show.py:Show",
            "max_turns": 3,
            "max_new_tokens": 30,
            "max_trajectory_tokens": 200,
            "stop": ["e", "a"],  # a tiny model seldom ends a turn by itself
        },
    )
    (root / "recipe.yaml").write_text(recipe_to_yaml(written))
    return root / "recipe.yaml"


@pytest.fixture(scope="module")
def run(recipe) -> Path:
    assert main(["grpo", str(recipe)]) == 0
    return recipe.parent / "run"


def test_check_begins_a_trajectory(recipe, capsys):
    assert main(["check", str(recipe)]) == 0
    said = capsys.readouterr().out
    assert "tools: none; turns join as the chat template writes them" in said
    assert "reward environment: 0.25 for a made-up completion" in said


def test_check_names_an_environment_that_fails(recipe, capsys):
    assert main(["check", str(recipe), f"rollout.environment={recipe.parent}/broken.py:Show"]) == 3
    assert "get_reward: " in (said := capsys.readouterr().err) and "no board" in said


def test_preview_shows_what_reset_adds(recipe, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["data", "preview", str(recipe), "--rows", "2", "--output", str(page)]) == 0
    text = page.read_text()
    assert text.count("data:image/webp;base64,") >= 2
    assert text.count("Look.") == 2


def test_a_run_has_turns_and_their_pictures_in_metrics_records_and_report(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows[1:]:
        assert row["turns/mean"] > 1 and row["environment/failed"] == 0
        assert row["tokens/observed"] > 0
    assert rows[0]["eval/reward/mean"] > 0
    assert "Look 1 times." in (run / "report.html").read_text()


def test_eval_and_predict_use_the_environment(run, recipe, capsys):
    assert main(["eval", str(run)]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert f"mean reward {rows[-1]['eval/reward/mean']:.3f} on 12" in capsys.readouterr().out
    image = str(recipe.parent / "1-0.png")
    assert main(["predict", str(run), "--image", image, "Where?", "--max-new-tokens", "40"]) == 0
