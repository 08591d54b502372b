"""The attention of a vision tower in one call for all spans of a length, against transformers' `sdpa` for each span."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from tests.tiny_models import QWEN_FAMILIES, noise_image, tiny_policy
from tiercel.config.schema import Lora, Model
from tiercel.models.families.loading import load_family
from tiercel.models.layers import tower_attention
from tiercel.models.layers.tower_attention import IMPLEMENTATION, patches_product, sorted_windows
from tiercel.packing.forward import PackedPolicy
from tiercel.types import EncodedImage, PixelLimits

CPU = torch.device("cpu")


def visuals(family, seed: int, count: int) -> list[EncodedImage]:
    """Pictures of random sizes, and a video of three frames."""
    draw = random.Random(seed)
    sizes = [(28 * draw.randint(1, 7), 28 * draw.randint(1, 7)) for _ in range(count)]
    found = [family.encode_image(noise_image(*size, seed=number)) for number, size in enumerate(sizes)]
    plan = family.plan_video((84, 112), 3, 1.0, PixelLimits(least=28 * 28, most=112 * 112))
    video = family.encode_video([noise_image(84, 112, seed=number) for number in range(3)], plan)
    return [*found, video]


@contextmanager
def span_by_span(policy) -> Iterator[None]:
    """Let transformers compute the tower in its own way, without tiercel."""
    config = policy.model.model.visual.config
    config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        config._attn_implementation = IMPLEMENTATION


def theirs(policy, images: list[EncodedImage]) -> list[torch.Tensor]:
    """Features by transformers' own entry, which prepares nothing."""
    family = policy.family
    patches = torch.cat([family.patches(image, CPU, torch.float32) for image in images])
    grids = torch.tensor([image.plan.grid for image in images])
    with span_by_span(policy):
        output = policy.model.model.get_image_features(patches, grids)
    features = torch.cat(list(output.pooler_output))
    if family.feature_layers > 1:
        deeper = [layer if torch.is_tensor(layer) else torch.cat(list(layer)) for layer in output.deepstack_features]
        features = torch.cat([features, *deeper], dim=1)
    return features.split([len(of_image) for of_image in output.pooler_output])


@pytest.mark.parametrize("name", QWEN_FAMILIES)
def test_features_equal_those_of_transformers(tiny_checkpoints, name):
    policy = tiny_policy(tiny_checkpoints[name])
    for seed, count in enumerate((1, 2, 5)):
        images = visuals(policy.family, seed, count)
        with torch.no_grad():
            for ours, expected in zip(policy.vision_features(images), theirs(policy, images), strict=True):
                torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("checkpointed", (False, True))
@pytest.mark.parametrize("name", QWEN_FAMILIES)
def test_gradients_equal_those_of_transformers(tiny_checkpoints, name, checkpointed):
    policy = tiny_policy(tiny_checkpoints[name], Lora(rank=4, alpha=8, targets="vision"), noise=0.1)
    images = visuals(policy.family, 7, 3)
    if checkpointed:
        PackedPolicy(policy, "split", True).train()

    def gradients(features: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        torch.cat(list(features)).square().mean().backward()
        found = {key: each.grad for key, each in policy.trained_parameters().items() if each.grad is not None}
        policy.model.zero_grad()
        return found

    ours, expected = gradients(policy.vision_features(images)), gradients(theirs(policy, images))
    assert ours.keys() == expected.keys() and len(ours) > 4
    for key, value in expected.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-6)


@pytest.fixture
def calls(monkeypatch) -> list[torch.Size]:
    """The shapes of the queries of each call of the attention."""
    found: list[torch.Size] = []
    real: Callable = tower_attention.scaled_dot_product_attention

    def counted(query, *arguments, **options):
        found.append(query.shape)
        return real(query, *arguments, **options)

    monkeypatch.setattr(tower_attention, "scaled_dot_product_attention", counted)
    return found


def test_a_layer_calls_attention_once_for_each_length_of_a_picture(tiny_checkpoints, calls):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"])
    # 84 x 84 is a grid of 6 x 6; windows of 4 x 4 make spans of 16, 8, 8 and 4 patches
    policy.vision_features([policy.family.encode_image(noise_image(84, 84, seed)) for seed in range(2)])
    heads, size = 2, 16
    windows = [(1, heads, 4, size), (2, heads, 8, size), (1, heads, 16, size)]
    # the second layer sees whole pictures
    assert [tuple(shape) for shape in calls] == [*windows, *windows, (2, heads, 36, size)]


def test_windows_of_a_frame_are_sorted_by_length():
    # patches are merged by four; the first frame has windows of 2, 1 and 2 merged patches, the second one of 1
    index, bounds = torch.tensor([0, 1, 4, 2, 3, 5]), torch.tensor([0, 8, 12, 20, 24], dtype=torch.int32)
    index, bounds = sorted_windows(index, bounds, torch.tensor([0, 20, 24], dtype=torch.int32))
    assert index.tolist() == [4, 0, 1, 2, 3, 5]
    assert bounds.tolist() == [0, 4, 12, 20, 24] and bounds.dtype == torch.int32


@pytest.mark.parametrize("name", QWEN_FAMILIES)
def test_a_forward_pass_of_transformers_own_is_right_too(tiny_checkpoints, name, calls):
    policy = tiny_policy(tiny_checkpoints[name])
    images = visuals(policy.family, 1, 2)
    patches = torch.cat([policy.family.patches(image, CPU, torch.float32) for image in images])
    grids = torch.tensor([image.plan.grid for image in images])
    with torch.no_grad():
        output = policy.model.model.visual(patches, grid_thw=grids)
        found = policy.family.tower_features(output)
        assert calls
        torch.testing.assert_close(found, torch.cat(list(theirs(policy, images))), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", QWEN_FAMILIES)
def test_the_tower_gets_its_bounds_on_the_host(tiny_checkpoints, name):
    family = load_family(Model(path=str(tiny_checkpoints[name])))
    policy = tiny_policy(tiny_checkpoints[name])
    tower = policy.model.model.visual
    host = family.grid_inputs(tower, torch.tensor([[1, 4, 6], [2, 4, 4]]))
    inputs = tower_attention.tower_inputs(host, torch.device("meta"))
    assert {name for name, each in inputs.items() if torch.is_tensor(each) and each.device == CPU} == {
        name for name in host if name.startswith("cu_")
    }


@pytest.mark.parametrize("bias", [False, True])
def test_patches_are_one_product(bias):
    torch.manual_seed(0)
    layer = nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4), bias=bias)
    patches = torch.randn(5, 3, 2, 4, 4, requires_grad=True)
    weights = torch.randn(5, 8, 1, 1, 1)
    expected, found = layer(patches), patches_product(layer, patches)
    torch.testing.assert_close(found, expected)
    inputs = [patches, *layer.parameters()]
    gradients = [torch.autograd.grad((output * weights).sum(), inputs) for output in (expected, found)]
    torch.testing.assert_close(*gradients)


def test_inputs_larger_than_the_kernel_are_convolved():
    layer, images = nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4)), torch.randn(1, 3, 2, 8, 12)
    assert torch.equal(patches_product(layer, images), layer(images))
