"""Groups that fork do not depend on the number of ranks."""

import pytest

from tests.distributed.test_launch import STEPS, assert_same_weights, run
from tests.training.test_branch_runs import branch_recipe
from tests.training.test_loops import write_rows
from tests.training.test_resume import write_recipe
from tests.training.turn_recipes import records

pytestmark = pytest.mark.scale


@pytest.mark.parametrize("prompts", (4, 1))  # 1: the ranks share the first parts of the group
def test_two_ranks_sample_the_forks_of_one(tiny_checkpoints, tmp_path, prompts):
    rows = write_rows(tmp_path)
    for name, ranks in (("one", "1"), ("two", "2")):
        changes = {"optim": {"prompts_per_step": prompts}, "train": {"steps": STEPS, "save_every": STEPS}}
        recipe = branch_recipe(tiny_checkpoints["qwen2_5_vl"], rows, tmp_path / name, **changes)
        run(write_recipe(tmp_path / f"{name}.yaml", recipe), "--nproc", ranks)
    one, two = tmp_path / "one", tmp_path / "two"
    for step in range(1, STEPS + 1):
        found, expected = ([forks(line) for line in records(each, step)] for each in (two, one))
        assert found == expected
    assert_same_weights(two, one)


def forks(line: dict) -> tuple:
    return line["index"], [(each["seed"], each["token_ids"], each["forks"]) for each in line["completions"]]
