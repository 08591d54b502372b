"""Which groups of a step are computed."""

from types import SimpleNamespace

import pytest
import torch

from tests.packing.items import learnable_groups, prompt, scored_group
from tests.training.test_loops import grpo_recipe
from tiercel.training.grpo.minibatches import learnt_groups

ALONE = SimpleNamespace(kl=None, teacher=None)


@pytest.mark.parametrize(
    ("changes", "computed"),
    [
        ({}, [1]),
        ({"learner": {"skip_zero_advantage": False}}, [0, 1]),
        ({"algorithm": {"entropy_coef": 0.1}}, [0, 1]),
        ({"algorithm": {"loss": {"call": "own.py:loss"}}}, [0, 1]),  # it may have terms without the advantage
    ],
)
def test_groups_of_equal_rewards_are_left_out_if_they_add_nothing(tmp_path, changes, computed):
    equal = scored_group(prompt([7], 0), [([8], 1.0), ([9], 1.0)])
    unequal = scored_group(prompt([1, 2, 3], 1), [([5], 0.0), ([6], 1.0)])
    recipe = grpo_recipe(tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / "run", **changes)
    found = learnt_groups(ALONE, learnable_groups([equal, unequal]), recipe)
    assert [group.item.prompt.index for group in found] == computed


@pytest.mark.parametrize(("engine", "is_computed"), [("local", True), ("vllm", False)])
def test_an_unknown_logprob_of_an_engine_is_not_taken_for_a_broken_one(tmp_path, engine, is_computed):
    (group,) = learnable_groups([scored_group(prompt([7], 0), [([8], 1.0), ([9], 1.0)])])
    group.sampler_logprobs[0].fill_(torch.nan)
    recipe = grpo_recipe(tmp_path / "model", tmp_path / "rows.jsonl", tmp_path / "run", rollout={"engine": engine})
    assert bool(learnt_groups(ALONE, [group], recipe)) == is_computed
