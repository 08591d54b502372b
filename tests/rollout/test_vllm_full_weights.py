"""The names of all weights in a checkpoint, as an engine gets them in full fine-tuning."""

import pytest
import torch
from safetensors.torch import load_file

from tiercel.config.schema import Model
from tiercel.errors import EnvironmentProblem
from tiercel.models.families.loading import load_family
from tiercel.models.weights.loading import load_weights
from tiercel.rollout.vllm.full_weights import CheckpointForm, checkpoint_shapes, read_weights, require_same

SHAPES = {"a.weight": (2, 3), "lm_head.weight": (3, 2)}
TIED = r"lm_head\.weight$"


def loaded(checkpoint):
    family = load_family(Model(path=str(checkpoint)))
    return family, load_weights(family, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("name", ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "gemma3"))
def test_an_engine_is_given_the_tensors_of_the_checkpoint_by_their_names(tiny_checkpoints, name):
    family, model = loaded(tiny_checkpoints[name])
    given = dict(CheckpointForm.of(family, model).weights(model))
    wanted = load_file(tiny_checkpoints[name] / "model.safetensors")
    assert given.keys() == wanted.keys() == dict(read_weights(tiny_checkpoints[name])).keys()
    assert all(torch.equal(given[key], wanted[key]) for key in wanted)
    assert checkpoint_shapes(tiny_checkpoints[name]) == {key: tuple(each.shape) for key, each in wanted.items()}
    held = {parameter.data_ptr() for parameter in model.parameters()}
    assert {tensor.data_ptr() for tensor in given.values()} <= held  # nothing is copied


def test_experts_are_refused(tiny_checkpoints):
    with pytest.raises(EnvironmentProblem, match=r"qwen3_vl_moe has experts.*rollout\.engine: local"):
        CheckpointForm.of(*loaded(tiny_checkpoints["qwen3_vl_moe"]))


@pytest.mark.parametrize(
    ("given", "says"),
    (
        ({"lm_head.weight": (3, 2)}, "a.weight is missing from the trainer's weights"),
        ({"b.weight": (2, 3), "a.weight": (2, 3)}, "b.weight is not in the checkpoint"),
        ({"a.weight": (3, 2)}, "a.weight has a different shape in the checkpoint"),
    ),
)
def test_a_name_or_a_shape_that_differs_is_named(given, says):
    with pytest.raises(EnvironmentProblem, match=says):
        require_same(given, SHAPES, TIED)


def test_a_tied_head_need_not_be_given():
    require_same({"a.weight": (2, 3)}, SHAPES, TIED)
    with pytest.raises(EnvironmentProblem, match=r"lm_head\.weight is missing"):
        require_same({"a.weight": (2, 3)}, SHAPES, "(?!)")
