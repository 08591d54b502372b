"""Bytes that a run writes, worked by hand."""

from types import SimpleNamespace

import pytest

from tiercel.config.schema import GrpoRecipe, SftRecipe
from tiercel.planning.run_files import RowCounts, run_files

SIZES = SimpleNamespace(trained=1_000_000, weights=5_000_000)
BASE = {
    "model": {"path": "m", "dtype": "bfloat16"},
    "data": {"train": "rows.jsonl", "eval": "held.jsonl"},
    "output": "run",
}


def grpo(**changes) -> GrpoRecipe:
    tree = {
        **BASE,
        "lora": {"rank": 8},
        "rewards": [{"name": "exact"}],
        "rollout": {"group_size": 8, "max_new_tokens": 128},
        "optim": {"prompts_per_step": 16},
        "train": {"steps": 10_000},
    }
    return GrpoRecipe.model_validate({**tree, **changes})


def test_ten_thousand_steps_of_megapixel_pictures_stay_under_2_gb():
    """A line of a completion: 150 + 2.5 * 128 = 470 bytes; of a step 16 * 8 * 470, and 8 * 4 * 128 * 9 in tokens/."""
    files = run_files(grpo(), SIZES, 10_000, RowCounts(rows=200_000, images=200_000))
    assert files.rollouts == 10_000 * (16 * 8 * 386.8 + 8 * 4 * 128 * 6.8) == 773_632_000
    assert files.pictures == 40_000 * 16_000 == 640_000_000
    assert files.rollouts + files.pictures < 2_000_000_000
    assert (files.checkpoint, files.checkpoints) == (12_000_000, 4)
    assert files.total == 773_632_000 + 640_000_000 + 48_000_000


@pytest.mark.parametrize(
    ("record_images", "images", "pictures"), ((4, 100, 110), (0, 100, 0), ("all", 10**6, 1610), (99, 10**6, 1610))
)
def test_a_picture_is_kept_once(record_images, images, pictures):
    """100 steps of 16 prompts with a picture each show 1,600; 10 are held out."""
    recipe = grpo(rollout={"record_images": record_images})
    files = run_files(recipe, SIZES, 100, RowCounts(rows=images, images=images, heldout=10, heldout_images=10))
    assert files.pictures == 16_000 * pictures


def test_evaluations_are_lines_too():
    """100 steps, evaluated every 50, and before the first: 3 * 10 lines of 150 + 2.5 * 256 bytes."""
    with_rows = grpo(rollout={"record_tokens": 0}, train={"steps": 100, "eval_every": 50})
    counts = RowCounts(rows=9, images=0, heldout=10)
    without = run_files(with_rows, SIZES, 100, RowCounts(rows=9, images=0))
    assert run_files(with_rows, SIZES, 100, counts).rollouts - without.rollouts == round(3 * 10 * 623.6)


def test_full_fine_tuning_saves_the_whole_model():
    recipe = SftRecipe.model_validate(
        {**BASE, "train": {"steps": 60, "keep": 5, "keep_best": "eval/loss", "eval_every": 9}}
    )
    files = run_files(recipe, SIZES, 60, RowCounts(rows=9, images=9, heldout=9, heldout_images=9))
    assert files.checkpoint == 12 * 1_000_000 + 2 * 4_000_000
    assert (files.checkpoints, files.rollouts, files.pictures) == (2, 0, 0)
