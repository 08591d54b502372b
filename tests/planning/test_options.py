"""The microbatch that `auto` chooses holds every row that the recipe allows."""

import pytest

from tests.training.test_loops import grpo_recipe, sft_recipe, write_rows
from tiercel.config.keys import RECIPES
from tiercel.planning.devices import Machine
from tiercel.planning.memory import Measured
from tiercel.planning.options import memory_of, study
from tiercel.planning.probe import NOTHING, LinearBytes

OWN = {"sft": {}, "dpo": {"dpo": {"loss": "sigmoid"}}, "kto": {"kto": {}}, "reward": {"ranking": {}}}


@pytest.mark.parametrize(("kind", "rows"), [("sft", 1), ("dpo", 2), ("kto", 2), ("reward", 2)])
def test_auto_holds_the_two_longest_answers_that_are_compared(tiny_checkpoints, tmp_path, kind, rows):
    tree = sft_recipe(tiny_checkpoints["qwen2_vl"], write_rows(tmp_path), tmp_path / "run").model_dump(exclude={"sft"})
    learner = {**tree["learner"], "max_tokens_per_microbatch": "auto"}
    subject = study(RECIPES[kind].model_validate({**tree, **OWN[kind], "learner": learner}), None)
    assert subject.smallest_tokens == rows * 200
    machine = Machine(ranks=1, memory_bytes=10**9, device=None)
    assert subject.auto_tokens(machine, most=subject.smallest_tokens) == rows * 200


def test_auto_holds_a_prompt_and_its_completion(tiny_checkpoints, tmp_path):
    recipe = grpo_recipe(tiny_checkpoints["qwen2_vl"], write_rows(tmp_path), tmp_path / "run")
    assert study(recipe, None).smallest_tokens == 200 + 6
    assert study(recipe, 50).smallest_tokens == 50 + 6


def test_ranks_that_compute_together_share_tokens_and_gather_keys(tiny_checkpoints, tmp_path):
    """At 1,000 tokens: the passes of 250, and keys and values of all tokens in each layer."""
    recipe = sft_recipe(tiny_checkpoints["qwen2_vl"], write_rows(tmp_path), tmp_path / "run", freeze=["vision"])
    text_only = Measured(learn=LinearBytes(constant=7, per_layer=0, per_token=3, per_layer_token=5), step=NOTHING)
    machine = Machine(ranks=4, memory_bytes=10**9, device=None)

    def passes(**train) -> int:
        subject = study(recipe.model_copy(update={"train": recipe.train.model_copy(update=train)}), None)
        return memory_of(subject, text_only, machine, "ddp")(1000).parts["learn"]["forward, backward and gradients"]

    sizes = study(recipe, None).sizes
    layers, width = sizes.layers, 2 * 4 * sizes.key_heads * sizes.head_size
    assert passes() == 7 + (3 + 5 * layers) * 1000
    assert passes(context_parallel=4) == 7 + (3 + 5 * layers) * 250 + layers * width * 1000


def test_a_group_of_ranks_learns_as_one(tiny_checkpoints, tmp_path):
    recipe = grpo_recipe(tiny_checkpoints["qwen2_vl"], write_rows(tmp_path), tmp_path / "run")
    machine = Machine(ranks=4, memory_bytes=10**9, device=None)
    together = recipe.model_copy(update={"train": recipe.train.model_copy(update={"context_parallel": 2})})
    assert study(together, None).learnt_tokens(machine) == 2 * study(recipe, None).learnt_tokens(machine)
