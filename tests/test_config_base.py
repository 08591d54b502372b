"""A recipe with other values, as searches and commands make it."""

import yaml

from tests.config.recipes import GRPO
from tiercel.config import GrpoRecipe


def test_values_at_dotted_keys_change_and_the_rest_stays():
    recipe = GrpoRecipe.model_validate(yaml.safe_load(GRPO))
    changed = recipe.with_values({"train.deepspeed.stage": 3, "train.strategy": "deepspeed", "lora": None})
    assert (changed.train.deepspeed.stage, changed.train.strategy, changed.lora) == (3, "deepspeed", None)
    assert changed.with_values({"train": recipe.train, "lora": recipe.lora}) == recipe
    assert recipe.with_values({}) is recipe
    assert "deepspeed" in changed.train.model_fields_set  # so that it is written as one that was given
