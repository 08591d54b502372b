"""Recipes that are made for what is already there."""

from tiercel.runs.recipe import recipe_of_model


def test_a_model_by_itself_is_computed_in_float32_on_a_cpu_and_takes_large_pictures():
    recipe = recipe_of_model("some/model")
    assert (recipe.model.path, recipe.model.dtype) == ("some/model", "float32")
    assert recipe.data.max_prompt_tokens == recipe.learner.max_tokens_per_microbatch == 32_768
