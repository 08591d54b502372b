"""Held-out rows for a policy that is not trained."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.rewards.samples import scored, scored_group
from tests.tiny_models import tiny_policy, tiny_recipe
from tiercel.errors import TrainingError
from tiercel.training.evaluation import Evaluator, Tally, require_few_failures, rows_at_once
from tiercel.training.policy_passes import passes_for_inference
from tiercel.types import RewardValue


def test_a_decoder_that_cannot_share_prompts_repeats_them_in_an_evaluation_too(tiny_checkpoints):
    recipe = tiny_recipe(tiny_checkpoints["qwen2_5_vl"])
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"])
    assert passes_for_inference(policy, recipe).learner.form == "split"
    policy.family.language_model(policy.model).config.layer_types = ["chunked_attention", "full_attention"]
    assert passes_for_inference(policy, recipe).learner.form == "repeated"


def test_rows_without_a_reward_are_told_and_are_no_zero():
    failed, passed = scored_group(scored(None)), scored_group(scored(0.5))
    assert summary(failed, failed) == "no reward for any of 2 held-out rows"
    assert summary(failed, passed) == "mean reward 0.500 on 2 held-out rows, of which 1 have none"
    assert summary(passed) == "mean reward 0.500 on 1 held-out row"


def summary(*groups):
    tally = Tally()
    tally.add_groups(groups)
    return tally.evaluation(rejected=0).summary()


def judged(is_correct, failure=None):
    rewards = {"mine": RewardValue(value=None if failure else 1.0, failure=failure)}
    return replace(scored_group(scored(1.0)).completions[0], rewards=rewards, is_correct=is_correct)


def tally_of(*completions):
    tally = Tally()
    tally.add_groups(replace(scored_group(scored(1.0)), completions=(each,)) for each in completions)
    return tally.evaluation(rejected=0)


def test_rows_that_no_reward_judges_do_not_count_in_the_accuracy():
    evaluation = tally_of(judged(True), judged(None), judged(False, "it ended"))
    row = evaluation.metrics()
    assert (row["eval/accuracy"], row["eval/judged"], row["eval/count"]) == (0.5, 2, 3)
    assert "eval/accuracy" not in tally_of(judged(None)).metrics()


def test_failed_rewards_are_counted_told_and_limited(tiny_checkpoints):
    recipe = tiny_recipe(tiny_checkpoints["qwen2_5_vl"])
    evaluation = tally_of(judged(True), judged(True), judged(True), judged(False, "it ended"))
    assert evaluation.metrics()["eval/failed_fraction"] == 0.25 and "failed on 1" in evaluation.summary()
    with pytest.raises(TrainingError, match="it ended"):  # a tenth may fail
        require_few_failures(evaluation, recipe)
    few = replace(evaluation, failures=replace(evaluation.failures, failed=0))
    require_few_failures(few, recipe)


@pytest.mark.parametrize(("world_size", "sizes"), ((1, [8, 8, 4]), (4, [2] * 10), (100, [1] * 20)))
def test_a_call_scores_as_many_rows_as_in_a_step(world_size, sizes):
    recipe = SimpleNamespace(optim=SimpleNamespace(prompts_per_step=4), rollout=SimpleNamespace(group_size=2))
    seen, beats = [], []
    scorer = SimpleNamespace(score=lambda groups: seen.append(len(groups)) or groups)
    evaluator = Evaluator(
        completion_sampler=None,
        vision=None,
        family=None,
        recipe=recipe,
        scorer=scorer,
        ranks=SimpleNamespace(world_size=world_size, heartbeat=SimpleNamespace(beat=lambda: beats.append(1))),
    )
    assert evaluator._scored(list(range(20))) == list(range(20)) and seen == sizes
    assert len(beats) == len(sizes)


@pytest.mark.parametrize(("has_turns", "expected"), ((False, 512), (True, 8)))
def test_with_turns_as_many_rows_are_sampled_as_a_step_has_completions(has_turns, expected):
    rollout = SimpleNamespace(group_size=2, has_turns=has_turns)
    assert rows_at_once(SimpleNamespace(optim=SimpleNamespace(prompts_per_step=4), rollout=rollout), 2) == expected
