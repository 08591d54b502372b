"""Held-out rows for a policy that is not trained."""

from tests.rewards.samples import scored, scored_group
from tests.tiny_models import tiny_policy, tiny_recipe
from tiercel.training.evaluation import Tally
from tiercel.training.policy_passes import passes_for_inference


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
