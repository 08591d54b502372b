"""GRPO on steps whose rows are questions of the same pictures: a prefix tree of several prompts in each."""

import json
from pathlib import Path
from statistics import mean

from tests.tiny_models import noise_image
from tests.training.test_loops import REWARD, grpo_recipe, run_grpo
from tests.training.test_resume import STEPS, require_same_bytes_after_kills
from tiercel.config import GrpoRecipe
from tiercel.runs.directory import read_metrics

SYSTEM = "Look at the picture for as long as you want, and then say what there is to be said of it. " * 2


def write_questions(directory: Path, pictures: int = 3, questions: int = 4, size: tuple[int, int] = (84, 84)) -> Path:
    """Write rows whose neighbours show different pictures."""
    for picture in range(pictures):
        noise_image(*size, seed=picture).save(directory / f"{picture}.png")
    rows = [
        {
            "id": f"{picture}-{question}",
            "images": [f"{picture}.png"],
            "messages": [{"role": "user", "content": f"<image>What is at place {question}?"}],
            "answer": "[1, 2]",
        }
        for question in range(questions)
        for picture in range(pictures)
    ]
    (directory / "mine.py").write_text(REWARD)
    path = directory / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def grouped_recipe(checkpoint: Path, rows: Path, output: Path, **data) -> GrpoRecipe:
    data = {"eval": None, "workers": 1, "system": SYSTEM, "max_prompt_tokens": 250} | data
    learner = {"max_tokens_per_microbatch": 300}  # fewer than a step's tree has, which is cut
    train = {"steps": STEPS, "save_every": 2, "threads": 1}
    return grpo_recipe(checkpoint, rows, output, data=data, learner=learner, train=train)


def test_a_killed_run_on_questions_of_one_picture_ends_with_the_same_bytes(tiny_checkpoints, tmp_path):
    rows, checkpoint = write_questions(tmp_path), tiny_checkpoints["qwen2_5_vl"]
    grouping = {"group_by_prefix": True, "rows_per_prefix": 4}
    require_same_bytes_after_kills(lambda output: grouped_recipe(checkpoint, rows, output, **grouping), tmp_path)
    alone = run_grpo(grouped_recipe(checkpoint, rows, tmp_path / "alone"))
    runs = (tmp_path / "whole", alone)
    shared = {run: mean(row["tokens/shared_fraction"] for row in read_metrics(run)) for run in runs}
    assert shared[tmp_path / "whole"] > shared[alone] > 0.5  # prompts are shared by their completions in both
