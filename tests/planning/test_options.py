"""What `auto` takes for a microbatch holds every row that the recipe admits."""

import pytest

from tests.training.test_loops import grpo_recipe, sft_recipe, write_rows
from tiercel.config.keys import RECIPES
from tiercel.planning.machine import Machine
from tiercel.planning.options import study

OWN = {"sft": {}, "dpo": {"dpo": {"loss": "sigmoid"}}, "kto": {"kto": {}}, "reward": {"ranking": {}}}


@pytest.mark.parametrize(("kind", "rows"), [("sft", 1), ("dpo", 2), ("kto", 2), ("reward", 2)])
def test_auto_holds_the_two_longest_answers_that_are_compared(tiny_checkpoints, tmp_path, kind, rows):
    tree = sft_recipe(tiny_checkpoints["qwen2_vl"], write_rows(tmp_path), tmp_path / "run").model_dump()
    learner = {**tree["learner"], "max_tokens_per_microbatch": "auto"}
    subject = study(RECIPES[kind].model_validate({**tree, **OWN[kind], "learner": learner}), None)
    assert subject.smallest_tokens == rows * 200
    machine = Machine(ranks=1, memory_bytes=10**9, device=None)
    assert subject.auto_tokens(machine, most=subject.smallest_tokens) == rows * 200


def test_auto_holds_a_prompt_and_its_completion(tiny_checkpoints, tmp_path):
    recipe = grpo_recipe(tiny_checkpoints["qwen2_vl"], write_rows(tmp_path), tmp_path / "run")
    assert study(recipe, None).smallest_tokens == 200 + 6
    assert study(recipe, 50).smallest_tokens == 50 + 6
