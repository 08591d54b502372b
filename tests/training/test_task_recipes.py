"""Five steps of each family of task's recipe, on scenes of real handwriting and a tiny checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.scenes import Scene, draw_scene
from tests.training.test_loops import run_grpo
from tiercel.config import load_recipe
from tiercel.demo.handwriting import load_digit_images
from tiercel.runs.directory import read_metrics

pytestmark = pytest.mark.catalogue
RECIPES = Path(__file__).parents[2] / "recipes"
ROWS = 12
# A question about a scene with this number of digits, and its right answer.
TASKS: dict[str, Callable[[Scene, int], tuple[str, Any]]] = {
    "grounding": lambda scene, count: (f"Where is the {scene.digit}?", [list(scene.box)]),
    "counting": lambda scene, count: ("How many digits are there?", count),
    "ocr": lambda scene, count: ("Read a digit.", [str(scene.digit), "a digit"]),
    "math": lambda scene, count: (f"What is twice the {scene.digit}?", f"${2 * scene.digit}$"),
    "gui": lambda scene, count: (f"Click on the {scene.digit}.", list(scene.box)),
}


def write_task(task: str, directory: Path) -> Path:
    images, labels = load_digit_images()
    generator = np.random.default_rng(0)
    lines = []
    for number in range(ROWS):
        count = 1 + number % 3
        scene = draw_scene(images, labels, count, generator)
        scene.image.save(directory / f"{number}.png")
        question, answer = TASKS[task](scene, count)
        messages = [{"role": "user", "content": f"<image>{question}"}]
        lines.append(json.dumps({"images": [f"{number}.png"], "messages": messages, "answer": answer}))
    file = directory / "rows.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


@pytest.mark.parametrize("task", TASKS)
def test_five_steps_of_a_task(tiny_checkpoints, tmp_path, task):
    rows = write_task(task, tmp_path)
    changes = {
        "model.path": str(tiny_checkpoints["qwen2_5_vl"]),
        "model.dtype": "float32",
        "data.train": str(rows),
        "data.eval": str(rows),
        "data.image_root": str(tmp_path),
        "data.workers": 0,
        "rollout.group_size": 4,
        "rollout.max_new_tokens": 12,
        "optim.prompts_per_step": 4,
        "optim.lr": 1e-3,
        "train.steps": 5,
        "train.save_every": 5,
        "train.eval_every": 5,
        "train.threads": 1,
        "output": str(tmp_path / "run"),
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    run = run_grpo(load_recipe("grpo", RECIPES / f"{task}-grpo.yaml", overrides))
    metrics = read_metrics(run)
    assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4, 5]
    assert all(row["reward/failed_fraction"] == 0 for row in metrics[1:])
    assert "eval/accuracy" in metrics[0] and "eval/reward/mean" in metrics[5]
