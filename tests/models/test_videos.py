"""Videos in the families of Qwen against Hugging Face's own code, on tiny random checkpoints."""

import re
from dataclasses import replace

import pytest
import torch
from transformers import Qwen3VLProcessor

from tests.tiny_models import FAMILY_NAMES, QWEN_FAMILIES, make_row, noise_image, tiny_policy
from tiercel.config.schema import Model
from tiercel.errors import DataError
from tiercel.models.families.loading import load_family
from tiercel.models.prompts import completion_positions, encode_conversation, encode_prompt, prompt_length
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.forward import PackedPolicy
from tiercel.packing.layout import Continuation, PackItem, pack
from tiercel.types import ImageSource, PixelLimits, VideoSource

LIMITS = PixelLimits(least=28 * 28, most=112 * 112)
FRAMES = [noise_image(84, 56, seed) for seed in range(5)]
FPS = 1.0  # so that Qwen2.5-VL's layers are several positions apart; whole seconds, because transformers 5.17 cuts


def encoded(family, frame_count=5):
    """A row with a video and an image."""
    row = make_row("row", "<video>and <image>Where is the seven?", 0)
    row = replace(row, images=(ImageSource(path="i.png"),), videos=(VideoSource(path="v.mp4"),))
    plan = family.plan_video((84, 56), frame_count, FPS, LIMITS)
    visuals = [family.encode_video(FRAMES[:frame_count], plan), family.encode_image(noise_image(56, 56, 9))]
    return row, visuals


def prompt_of(family, frame_count=5):
    row, visuals = encoded(family, frame_count)
    return encode_prompt(family, row, 0, visuals, system=None, max_prompt_tokens=400)


def patches_by_hand(family, images):
    """The video processors' patches, written out: (layer, row of merged, column of merged, row, column, channel, frame,
    pixels of a patch)."""
    processor = family.checkpoint.image_processor
    mean, std = torch.tensor(processor.image_mean), torch.tensor(processor.image_std)
    patch, merge = processor.patch_size, processor.merge_size
    found = []
    for image in images:
        frames = torch.stack([view.float() / 255 for view in image.views])
        frames = ((frames - mean) / std).permute(0, 3, 1, 2)
        if image.plan.fps is None:
            frames = frames.repeat(2, 1, 1, 1)
        if len(frames) % 2:
            frames = torch.cat([frames, frames[-1:]])
        layers, (height, width) = len(frames) // 2, frames.shape[2:]
        shape = (layers, 2, 3, height // patch // merge, merge, patch, width // patch // merge, merge, patch)
        pieces = frames.reshape(shape).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        found.append(pieces.reshape(-1, 3 * 2 * patch * patch))
    return found


@pytest.mark.parametrize("frame_count", (1, 2, 5))
@pytest.mark.parametrize("name", QWEN_FAMILIES)
def test_patches_of_a_video(tiny_checkpoints, name, frame_count):
    family = load_family(Model(path=str(tiny_checkpoints[name])))
    _, visuals = encoded(family, frame_count)
    for image, expected in zip(visuals, patches_by_hand(family, visuals), strict=True):
        torch.testing.assert_close(
            family.patches(image, torch.device("cpu"), torch.float32), expected, rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("frame_count", (1, 2, 5))
@pytest.mark.parametrize("name", QWEN_FAMILIES)
def test_positions_equal_the_models_own(tiny_checkpoints, name, frame_count):
    policy = tiny_policy(tiny_checkpoints[name])
    prompt = prompt_of(policy.family, frame_count)
    config = policy.family.checkpoint.config
    ids = prompt.token_ids_P[None]
    kinds = (ids == config.image_token_id).int() + 2 * (ids == config.video_token_id).int()
    video, image = (torch.tensor([visual.plan.grid]) for visual in prompt.images)
    more = {"second_per_grid_ts": torch.tensor([2 / FPS])} if name == "qwen2_5_vl" else {}
    expected, _ = policy.model.model.get_rope_index(
        ids, mm_token_type_ids=kinds, image_grid_thw=image, video_grid_thw=video, **more
    )
    expected = expected[:, 0]
    end = int((ids[0] == config.video_token_id).nonzero().max()) + 1
    assert torch.equal(prompt.positions_DP[:, :end], expected[:, :end])
    # what follows starts one past the largest position so far, as when a model generates
    later = int(prompt.positions_DP[:, :end].max()) + 1 - int(expected[0, end])
    assert torch.equal(prompt.positions_DP[:, end:], expected[:, end:] + later)
    assert (later > 0) == (name == "qwen2_5_vl" and frame_count == 5)


@pytest.mark.parametrize("name", QWEN_FAMILIES)
def test_logprobs_equal_a_plain_forward(tiny_checkpoints, name):
    policy = tiny_policy(tiny_checkpoints[name], noise=0.1)
    family = policy.family
    prompt = prompt_of(family)
    ids_C = torch.tensor([5, 9, 11])
    positions_DL = (prompt.positions_DP.max() + 1 + torch.arange(3)).expand(3, -1)
    item = PackItem(
        prompt=prompt,
        continuations=(
            Continuation(token_ids_L=ids_C, positions_DL=positions_DL, is_scored_L=torch.ones(3, dtype=torch.bool)),
        ),
    )
    packed = pack([item])
    video, image = prompt.images
    video_patches, image_patches = patches_by_hand(family, prompt.images)
    ids = torch.cat([prompt.token_ids_P, ids_C])
    with torch.no_grad():
        found = PackedPolicy(policy, "split", False)(
            packed, VisionStore(policy, 0).features(packed.images), 1.0
        ).logprobs_N
        logits = policy.model(
            input_ids=ids[None],
            position_ids=torch.cat([prompt.positions_DP, positions_DL], dim=1)[:, None],
            pixel_values=image_patches,
            image_grid_thw=torch.tensor([image.plan.grid]),
            pixel_values_videos=video_patches,
            video_grid_thw=torch.tensor([video.plan.grid]),
            mm_token_type_ids=torch.zeros_like(ids)[None],
        ).logits[0]
    logits[:, list(family.placeholder_ids)] = -torch.inf
    expected = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[-3:, 0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", QWEN_FAMILIES)
def test_the_length_is_known_from_the_headers(tiny_checkpoints, name):
    family = load_family(Model(path=str(tiny_checkpoints[name])))
    row, _ = encoded(family)
    plans = [family.plan_video((84, 56), 5, FPS, LIMITS), family.plan_image((56, 56))]
    prompt = prompt_of(family)
    assert prompt_length(family, row, plans, None) == len(prompt.token_ids_P)
    assert [image.plan for image in prompt.images] == plans
    assert plans[0].grid == (3, 4, 6) and family.feature_count(plans[0]) == 3 * 6


def test_qwen3_says_when_a_layer_was(tiny_checkpoints):
    family = load_family(Model(path=str(tiny_checkpoints["qwen3_vl"])))
    text = family.tokenizer.decode(family.image_token_ids(family.plan_video((84, 56), 5, 0.8, LIMITS)))
    # frames at 0, 1.25, 2.5, 3.75 and 5 seconds; a layer is at the middle of its two, and the odd last one occurs twice
    layer = "<|vision_start|>" + "<|video_pad|>" * 6 + "<|vision_end|>"
    assert text == f"<0.6 seconds>{layer}<3.1 seconds>{layer}<5.0 seconds>{layer}"


def test_qwen3_rounds_times_as_transformers_does(tiny_checkpoints):
    """The time of frames 6 and 7 at 10 a second is 0.65, which is between 0.6 and 0.7: the sum of 0.6 and 0.7 is less
    than 1.3."""
    family = load_family(Model(path=str(tiny_checkpoints["qwen3_vl"])))
    text = family.tokenizer.decode(family.image_token_ids(family.plan_video((84, 56), 8, 10.0, LIMITS)))
    times = Qwen3VLProcessor._calculate_timestamps(None, list(range(8)), 10.0)
    assert re.findall(r"<([\d.]+) seconds>", text) == [f"{time:.1f}" for time in times] == ["0.1", "0.2", "0.5", "0.6"]


@pytest.mark.parametrize("frame_count", (1, 2, 7, 32))
def test_an_engine_that_rounds_less_exactly_computes_the_same_positions(tiny_checkpoints, frame_count):
    """vLLM multiplies in float64 an interval that it has in float32. At 2.4 frames a second, layer 3 is at position 10,
    or 9.99999976 by vLLM."""
    family = load_family(Model(path=str(tiny_checkpoints["qwen2_5_vl"])))
    differ = 0
    for tenths in range(2, 301):
        plan = family.plan_video((84, 56), frame_count, tenths / 10, LIMITS)
        (times,) = family.grid_times(plan)
        assert layer_times(family.told_fps(plan), len(times)) == times, tenths
        differ += layer_times(tenths / 10, len(times)) != times
    assert (differ > 0) == (frame_count > 2)


def layer_times(fps: float, layers: int) -> list[int]:
    """As vLLM 0.32 computes them, of a model with 4 positions a second."""
    apart = torch.tensor([2 / fps])[0].item() * 4
    return [int(layer * apart) for layer in range(layers)]


@pytest.mark.parametrize("name", QWEN_FAMILIES)
def test_one_placeholder_for_a_video(tiny_checkpoints, name):
    family = load_family(Model(path=str(tiny_checkpoints[name])))
    prompt = prompt_of(family)
    ids = family.unexpanded_token_ids(prompt.token_ids_P, [image.plan for image in prompt.images])
    image, video = family.placeholder_ids
    assert [token for token in ids if token in (image, video)] == [video, image]
    start = ids.index(video)
    whole = family.image_token_ids(prompt.images[0].plan)
    assert ids[:start] + whole == prompt.token_ids_P[: start + len(whole)].tolist()


@pytest.mark.parametrize("name", sorted(set(FAMILY_NAMES) - set(QWEN_FAMILIES)))
def test_other_families_read_no_videos(tiny_checkpoints, name):
    family = load_family(Model(path=str(tiny_checkpoints[name])))
    with pytest.raises(DataError, match="does not read videos here") as error:
        family.plan_video((84, 56), 5, FPS, LIMITS)
    assert error.value.field == "videos"


@pytest.mark.parametrize("name", QWEN_FAMILIES)
def test_sft_learns_an_answer_where_sampling_would_write_it(tiny_checkpoints, name):
    family = load_family(Model(path=str(tiny_checkpoints[name])))
    row, visuals = encoded(family)
    conversation = encode_conversation(family, row, 0, visuals, system=None, max_prompt_tokens=400)
    length = len(conversation.token_ids_L)
    expected = completion_positions(conversation.prompt.positions_DP, length)
    assert torch.equal(conversation.positions_DL, expected)
