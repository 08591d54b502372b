"""Held-out rows of a policy that is not trained."""

from tests.tiny_models import tiny_policy, tiny_recipe
from tiercel.training.learners import passes_for_inference


def test_a_decoder_that_cannot_share_prompts_repeats_them_in_an_evaluation_too(tiny_checkpoints):
    recipe = tiny_recipe(tiny_checkpoints["qwen2_5_vl"])
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"])
    assert passes_for_inference(policy, recipe).learner.form == "split"
    policy.family.language_model(policy.model).config.layer_types = ["chunked_attention", "full_attention"]
    assert passes_for_inference(policy, recipe).learner.form == "repeated"
