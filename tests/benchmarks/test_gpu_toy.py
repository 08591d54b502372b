"""The GPU benchmark at toy size on CPU, and its count of operations against hand counts and torch's own counter."""

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.flops import (
    Linear,
    decoder_shape,
    linear_update,
    vision_forward,
)
from benchmarks.gpu import CELLS, TOY, find_card, make_groups, markdown, measure
from benchmarks.gpu_learners import PlainLearner, SharedLearner, set_checkpointing
from benchmarks.gpu_models import MODELS, make_config, random_policy

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_disable` is deprecated:FutureWarning")


def test_operations_of_one_linear_layer_by_hand():
    layer = Linear(inputs=4, outputs=6)
    once = linear_update(10, layer, 2, needs_input_gradient=True)
    assert once.linear == 480 + 480  # 2 x 10 x 4 x 6: forward, and the gradient of the input
    # Forward 2 x 10 x 2 x (4 + 6) = 400; backward as much for the two weights, and as much for the two inputs.
    assert once.lora == 3 * 400
    first = linear_update(10, layer, 2, needs_input_gradient=False)
    assert first.linear == 480
    assert first.lora == 3 * 400 - 160  # 2 x 10 x 4 x 2, the gradient of A's input
    twice = linear_update(10, layer, 2, needs_input_gradient=True, forwards=2)
    assert (twice.linear, twice.lora) == (3 * 480, 4 * 400)


def test_windows_at_the_edges_of_a_picture_are_smaller():
    config = make_config(MODELS["7b"]).vision_config
    # 68 patches a side are 8 windows of 8 and one of 4; 4 blocks of 32 attend to the whole picture.
    pairs = 28 * (8 * 8**2 + 4**2) ** 2 + 4 * (68 * 68) ** 2
    attention = 4 * 1280 * pairs
    linear = 2 * 4624 * (1176 * 1280 + 32 * (4 * 1280**2 + 3 * 1280 * 3420)) + 2 * 1156 * 5120 * (5120 + 3584)
    assert vision_forward(config, (1, 68, 68)).vision == attention + linear


@pytest.mark.skipif(
    transformers.__version__ < "5.23", reason="older ones make rotary angles by a product of matrices, which is counted"
)
@pytest.mark.parametrize("is_checkpointed", (False, True))
@pytest.mark.parametrize("is_shared", (True, False))
def test_operations_of_an_update_are_those_that_torch_counts(is_shared, is_checkpointed):
    policy = random_policy(MODELS["toy"], CPU, torch.float32)
    groups = make_groups(policy, CELLS["toy"], 2)
    shape = decoder_shape(policy.family.checkpoint.config.get_text_config(), 4)
    learner = SharedLearner(policy, "split", groups, 64) if is_shared else PlainLearner(policy, groups, 64)
    set_checkpointing(policy, is_checkpointed)
    with FlopCounterMode(display=False) as counter:
        learner.update()
    flops = learner.flops(shape, is_checkpointed)
    # torch counts no attention on CPU, and not the one of the head's two products that writes into its argument.
    images = 2 if is_shared else 6
    uncounted = flops.attention + images * 4 * 32 * (16**2 + 16**2)
    if is_shared:
        uncounted += flops.head / 2
    assert counter.get_total_flops() == flops.total - uncounted


@pytest.fixture(scope="module")
def toy_results():
    return measure(TOY, say=lambda text: None)


def test_a_toy_run_has_every_field_and_equal_gradients(toy_results):
    (row,) = toy_results["rows"]
    assert (row["model"], row["cell"], row["groups"]) == ("toy", "toy", 2)
    assert set(row["learners"]) == {"tiercel", "plain", "tiercel, checkpointed", "plain, checkpointed"}
    for learner in row["learners"].values():
        assert learner["error"] is None
        assert learner["step_seconds"]["count"] == TOY.repetitions
        assert learner["completion_tokens_per_second"] > 0
        assert learner["gradient_difference"] < 1e-5
    assert row["decoding"]["rows"] == 6
    assert row["decoding"]["new_tokens"] == 12
    assert row["decoding"]["weight_bytes"] > 0
    assert {"start_seconds", "step_seconds", "tokens_per_second", "floor_share"} <= set(row["decoding"])
    assert "toy, 14, 12, 3, plain, checkpointed" in markdown(toy_results)


def test_mfu_is_operations_by_time_and_peak(toy_results):
    for learner in toy_results["rows"][0]["learners"].values():
        parts = [value for name, value in learner["flops"].items() if name != "total"]
        assert all(value > 0 for value in parts)
        assert learner["flops"]["total"] == sum(parts)
        expected = sum(parts) / learner["step_seconds"]["median"] / TOY.card.flops
        assert learner["mfu"] == pytest.approx(expected, rel=1e-2)


def test_a_card_is_found_by_its_name():
    assert find_card("NVIDIA H200").bandwidth == 4.8e12
    assert find_card("NVIDIA H100 80GB HBM3").bandwidth == 3.35e12
    assert find_card("NVIDIA H100 PCIe").flops == 756e12
    assert find_card("Some other card") is None
