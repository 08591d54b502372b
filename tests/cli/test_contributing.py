"""The functions of CONTRIBUTING.md work as they are printed there, in a folder outside the package."""

import re
from pathlib import Path

from tests.training.test_loops import grpo_recipe, write_rows
from tiercel.cli.main import main
from tiercel.config import recipe_to_yaml
from tiercel.config.yaml_text import parse
from tiercel.runs.directory import read_metrics

DOCUMENT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_a_newcomers_reward_loss_and_advantage_work_the_first_time(tiny_checkpoints, tmp_path, monkeypatch):
    (functions,) = re.findall(r"^```python\n(# mine\.py\n.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    (keys,) = re.findall(r"^```yaml\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    own, _ = parse(keys)
    changes = {"data": {"eval": None, "workers": 0}, "train": {"steps": 2, "save_every": 2, "threads": 1}}
    rows = write_rows(tmp_path)
    (tmp_path / "mine.py").write_text(functions)
    monkeypatch.chdir(tmp_path)
    recipe = grpo_recipe(
        tiny_checkpoints["qwen2_5_vl"],
        rows,
        tmp_path / "run",
        algorithm=own["algorithm"],
        rewards=own["rewards"],
        **changes,
    )
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    assert main(["check", "recipe.yaml"]) == 0
    assert main(["grpo", "recipe.yaml"]) == 0
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2]
