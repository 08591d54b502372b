"""Pixels as tiercel gives them to the vision tower, compared bit by bit with transformers' image processors."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny_models import FAMILY_NAMES, QWEN_FAMILIES, mixed_rows, noise_image, tiny_policy
from tiercel.config.schema import Model
from tiercel.models.families.gemma4 import _places
from tiercel.models.families.image_transforms import normalised, normalised_tiles, picture_image, picture_tensor
from tiercel.models.families.loading import load_family
from tiercel.types import PixelLimits

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("size", ((28, 28), (56, 140), (112, 84)))
@pytest.mark.parametrize("name", QWEN_FAMILIES)
def test_patches_of_a_picture_equal_the_processors(tiny_checkpoints, name, size, dtype):
    family = load_family(Model(path=str(tiny_checkpoints[name])))
    image = family.encode_image(noise_image(*size, seed=3))
    processed = family.checkpoint.image_processor(
        images=[picture_image(image.views[0])], do_resize=False, return_tensors="pt"
    )
    assert torch.equal(family.patches(image, CPU, dtype), processed["pixel_values"].to(dtype))
    assert processed["image_grid_thw"].tolist() == [list(image.plan.grid)]


@pytest.mark.parametrize("frame_count", (1, 2, 3))
@pytest.mark.parametrize("name", QWEN_FAMILIES)
def test_patches_of_a_video_equal_the_processors_of_its_frames(tiny_checkpoints, name, frame_count):
    family = load_family(Model(path=str(tiny_checkpoints[name])))
    plan = family.plan_video((56, 84), frame_count, 1.0, PixelLimits(least=28 * 28, most=112 * 112))
    frames = [noise_image(56, 84, seed) for seed in range(frame_count)]
    found = family.patches(family.encode_video(frames, plan), CPU, torch.float32)
    processor = family.checkpoint.image_processor
    frames += frames[-1:] * (frame_count % 2)
    apart = [processor(images=[frame], do_resize=False, return_tensors="pt")["pixel_values"] for frame in frames]
    by_half = [each.unflatten(1, (3, 2, -1)) for each in apart]  # both halves of a picture are equal
    pairs = zip(by_half[::2], by_half[1::2], strict=True)
    expected = [torch.stack([first[:, :, 0], second[:, :, 1]], dim=2).flatten(1) for first, second in pairs]
    assert torch.equal(found, torch.cat(expected))


@pytest.mark.parametrize("name", sorted({*FAMILY_NAMES} - {*QWEN_FAMILIES, "gemma4"}))
def test_tiles_equal_the_processors(tiny_checkpoints, name):
    family = load_family(Model(path=str(tiny_checkpoints[name])))
    processor = family.checkpoint.image_processor
    pictures = [noise_image(56, 56, seed) for seed in range(3)]
    if name == "llava_onevision":  # several images of one prompt are not cut
        expected = processor(images=[pictures], do_resize=False, return_tensors="pt")["pixel_values"].flatten(0, 1)
    else:
        more = {} if name == "gemma3" else {"crop_to_patches": False}
        expected = processor(images=pictures, do_resize=False, return_tensors="pt", **more)["pixel_values"]
    found = normalised_tiles([picture_tensor(each) for each in pictures], processor, torch.empty(0))
    assert torch.equal(found, expected)


def test_patches_of_gemma4_equal_the_processors(tiny_checkpoints):
    """Up to the processor's padding, which the tower leaves out."""
    family = load_family(Model(path=str(tiny_checkpoints["gemma4"])))
    for size in ((64, 64), (48, 80), (96, 40)):
        image = family.encode_image(noise_image(*size, seed=1))
        picture = picture_image(image.views[0])
        expected = family.checkpoint.image_processor(images=[picture], do_resize=False, return_tensors="pt")
        found = family._patches(image, torch.empty(0))
        assert torch.equal(found, expected["pixel_values"][0, : len(found)])
        assert torch.equal(_places(*image.plan.grid), expected["image_position_ids"][0, : len(found)])
        assert bool((expected["image_position_ids"][0, len(found) :] == -1).all())


@pytest.mark.parametrize("keys", ({"do_rescale": False}, {"do_normalize": False}, {"image_std": [0.2, 0.3, 0.4]}))
def test_the_processors_keys_are_followed(tiny_checkpoints, keys):
    processor = load_family(Model(path=str(tiny_checkpoints["internvl"]))).checkpoint.image_processor
    for key, value in keys.items():
        setattr(processor, key, value)
    picture = noise_image(56, 56, 0)
    expected = processor(images=[picture], do_resize=False, crop_to_patches=False, return_tensors="pt")["pixel_values"]
    pixels = picture_tensor(picture).permute(2, 0, 1)[None]
    assert torch.equal(normalised(pixels, processor, torch.float32), expected.float())


@pytest.mark.parametrize("name", sorted({*FAMILY_NAMES} - {"gemma4"}))  # transformers' tower of it reads its mask
def test_a_pass_does_not_wait_for_the_device(tiny_checkpoints, name):
    """Tensors of the meta device have no numbers: reading one raises, and so does mixing them with those of the CPU."""
    policy = tiny_policy(tiny_checkpoints[name])
    images = [image for _, images in mixed_rows(policy.family) for image in images]
    expected = [each.shape for each in policy.vision_features(images)]
    policy.model.to("meta")
    features = policy.family.vision_features(policy.model, images)
    assert [each.shape for each in features] == expected
    assert {each.device.type for each in features} == {"meta"}


class Operations(TorchDispatchMode):
    """The names of the operations that run."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*arguments, **(options or {}))


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_features_take_their_places_without_a_count_of_tokens(tiny_checkpoints, name):
    """Operations whose result has as many rows as there are true entries make the host wait, backwards too."""
    family = load_family(Model(path=str(tiny_checkpoints[name])))
    placeholder = family.placeholder_ids[0]
    ids = torch.tensor([[5, placeholder, 6, placeholder], [placeholder, 7, 8, 9]])
    width = 64 * family.feature_layers
    embeddings = torch.zeros(2, 4, 64, requires_grad=True)
    features = (torch.arange(3.0)[:, None] + 1).expand(3, width).clone().requires_grad_()
    with Operations() as operations:
        found = family.with_features(embeddings, family.is_placeholder(ids), features)
        (found * torch.arange(8.0).view(2, 4, 1)).sum().backward()
    assert found[..., 0].tolist() == [[0, 1, 0, 2], [3, 0, 0, 0]]
    assert features.grad[:, 0].tolist() == [1, 3, 4]
    assert embeddings.grad[..., 0].tolist() == [[0, 0, 2, 0], [0, 5, 6, 7]]
    assert not operations.names & {"nonzero", "masked_select", "masked_scatter", "_local_scalar_dense"}
