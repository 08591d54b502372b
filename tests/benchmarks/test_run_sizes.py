"""What a run writes, measured on a step that is really written."""

from types import SimpleNamespace

from pytest import approx

from benchmarks.run_sizes import GROUP, KEPT, PROMPTS, STEPS, step_bytes
from tiercel.config.schema import GrpoRecipe
from tiercel.planning.run_files import RowCounts, run_files

TOKENS = 128
SIZES = SimpleNamespace(trained=1, weights=2)


def test_ten_thousand_steps_of_16_megapixel_pictures_take_less_than_2_gb_and_about_what_check_says():
    found = step_bytes(TOKENS)
    assert sum(found.values()) * STEPS < 2_000_000_000
    tree = {
        "model": {"path": "m"},
        "lora": {"rank": 8},
        "data": {"train": "rows.jsonl"},
        "rewards": [{"name": "exact"}],
        "rollout": {"group_size": GROUP, "max_new_tokens": TOKENS},
        "optim": {"prompts_per_step": PROMPTS},
        "train": {"steps": STEPS},
        "output": "run",
    }
    recipe = GrpoRecipe.model_validate(tree)
    assert recipe.rollout.most_pictured == KEPT
    rows = PROMPTS * STEPS
    told = run_files(recipe, SIZES, STEPS, RowCounts(rows=rows, images=rows))
    assert sum(found.values()) * STEPS == approx(told.rollouts + told.pictures, rel=0.1)
