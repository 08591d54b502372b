"""Trajectories do not depend on the number of ranks."""

import pytest

from tests.calling_models import save_calling_checkpoint
from tests.distributed.test_launch import STEPS, assert_same_weights, run
from tests.training.test_resume import write_recipe
from tests.training.turn_recipes import CALLS, records, turn_recipe

pytestmark = pytest.mark.scale


@pytest.mark.parametrize("prompts", (4, 1))  # 1: the ranks share the completions of the group
def test_two_ranks_sample_the_trajectories_of_one(tiny_checkpoints, tmp_path, prompts):
    checkpoint = save_calling_checkpoint(tiny_checkpoints["qwen2_5_vl"], tmp_path / "model", CALLS)
    for name, ranks in (("one", "1"), ("two", "2")):
        recipe = turn_recipe(
            checkpoint,
            tmp_path / "data",
            name,
            optim={"prompts_per_step": prompts},
            train={"steps": STEPS, "save_every": STEPS},
        )
        run(write_recipe(tmp_path / f"{name}.yaml", recipe), "--nproc", ranks)
    one, two = (tmp_path / "data" / name for name in ("one", "two"))
    for step in range(1, STEPS + 1):
        found, expected = ([trajectory(line) for line in records(each, step)] for each in (two, one))
        assert found == expected
    assert any(turn["images"] for line in records(one, 1) for each in line["completions"] for turn in each["turns"])
    assert_same_weights(two, one)


def trajectory(line: dict) -> tuple:
    """What was sampled and observed after a prompt."""
    return line["index"], [(each["seed"], each["token_ids"], each["turns"]) for each in line["completions"]]
