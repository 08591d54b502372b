"""The plan counts compiled decoder layers where the run would compile them."""

from dataclasses import replace

import pytest

from tests.training.test_loops import grpo_recipe, write_rows
from tiercel.planning.devices import DEVICES, Machine
from tiercel.planning.memory import Measured
from tiercel.planning.options import memory_of, study
from tiercel.planning.probe import NOTHING, LinearBytes, refitted

PASSES = "forward, backward and gradients"


def per_token(count: int) -> LinearBytes:
    return replace(NOTHING, per_token=count)


@pytest.mark.parametrize(
    ("learner", "quantize", "strategy", "device", "is_compiled"),
    [
        ({}, None, "ddp", "h100", True),
        ({}, None, "fsdp2", "h100", False),
        ({}, None, "ddp", None, False),
        ({}, "nf4", "ddp", "h100", False),
        ({"compile": False}, None, "ddp", "h100", False),
        ({"compile": True}, None, "ddp", None, True),
        ({"form": "dense"}, None, "ddp", "h100", False),
        ({"gradient_checkpointing": "selective"}, None, "ddp", "h100", False),
        ({"gradient_checkpointing": "full"}, None, "ddp", "h100", True),
    ],
)
def test_layers_are_compiled_as_in_a_run(tiny_checkpoints, tmp_path, learner, quantize, strategy, device, is_compiled):
    model = {"quantize": quantize}
    rows = write_rows(tmp_path)
    recipe = grpo_recipe(tiny_checkpoints["qwen2_vl"], rows, tmp_path / "run", learner=learner, model=model)
    machine = Machine(ranks=2, memory_bytes=10**9, device=DEVICES.get(device))
    measured = Measured(learn=per_token(3), compiled=lambda: per_token(2), step=NOTHING)
    held = memory_of(study(recipe, None), measured, machine, strategy)
    assert held(1000).parts["learn"][PASSES] == (2000 if is_compiled else 3000)


def test_terms_with_tokens_are_fitted_again():
    """5 + 7 L stay; 2 T + 3 L T become T + 2 L T."""
    start = LinearBytes(constant=5, per_layer=7, per_token=2, per_layer_token=3)
    found = refitted(start, lambda layers: 5 + 7 * layers + 100 + 2 * layers * 100, 100)
    assert found == LinearBytes(constant=5, per_layer=7, per_token=1, per_layer_token=2)


@pytest.mark.parametrize(
    ("device", "dtype", "fits"),
    [("rtx4090", "float32", False), ("rtx4090", "bfloat16", True), ("h100", "float32", True)],
)
def test_the_plan_knows_cards_that_cannot_run_flex(tiny_checkpoints, tmp_path, device, dtype, fits):
    """Heads of 512 in float32 need 132,096 bytes of shared memory, and an RTX 4090 has 101,376."""
    rows = write_rows(tmp_path)
    recipe = grpo_recipe(tiny_checkpoints["qwen2_vl"], rows, tmp_path / "run", model={"dtype": dtype})
    subject = study(recipe, None)
    subject.config.get_text_config().head_dim = 512
    machine = Machine(ranks=1, memory_bytes=10**9, device=DEVICES[device])
    assert (subject.flex_problem(machine) is None) == fits
    measured = Measured(learn=per_token(3), compiled=lambda: per_token(2), step=NOTHING)
    held = memory_of(subject, measured, machine, "single")(1000)
    assert held.parts["learn"][PASSES] == (2000 if fits else 3000)
    assert (held.parts["learn"]["block mask"] > 0) == fits
