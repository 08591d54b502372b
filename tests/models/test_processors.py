"""Prompts and pixels against Hugging Face's full processors, which need torchvision."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("torchvision", reason="the full processors need torchvision")

from tests.full_processors import full_processor
from tests.tiny_models import FAMILY_NAMES, make_row, noise_image
from tiercel.config.schema import Model
from tiercel.models.families.image_transforms import picture_image, picture_tensor
from tiercel.models.families.loading import load_family
from tiercel.models.prompts import encode_prompt, prompt_messages
from tiercel.models.rendering import render
from tiercel.types import PixelLimits, VideoSource


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_ids_equal_the_full_processors(tiny_checkpoints, name):
    family = load_family(Model(path=str(tiny_checkpoints[name])))
    pictures = [noise_image(84, 56, 1), noise_image(120, 50, 2), noise_image(333, 47, 3)]
    for count in (0, 1, 2, 3):
        row = make_row("row", "<image>" * count + "Where is the seven?", count)
        images = [family.encode_image(picture) for picture in pictures[:count]]
        ours = encode_prompt(family, row, 0, images, system=None, max_prompt_tokens=800)
        text = render(family, prompt_messages(row.messages), True)
        theirs = full_processor(family)(text=[text], images=pictures[:count] or None, return_tensors="pt")
        assert ours.token_ids_P.tolist() == theirs["input_ids"][0].tolist()


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_pixels_equal_the_full_processors_where_nothing_is_resized(tiny_checkpoints, name):
    family = load_family(Model(path=str(tiny_checkpoints[name])))
    side = 64 if name == "gemma4" else 56
    picture = noise_image(side, side, 4)
    image = family.encode_image(picture)
    assert image.plan.processed_size == (side, side)
    text = render(family, make_row("row", "<image>Where", 1, None).messages, True)
    theirs = full_processor(family)(text=[text], images=[picture], return_tensors="pt")["pixel_values"]
    more = {"crop_to_patches": False} if name in ("ovis2", "internvl") else {}
    images = [picture_image(view) for view in (image.views[0], *image.views[1:])]
    ours = family.checkpoint.image_processor(
        images=[images] if name == "llava_onevision" else images, do_resize=False, return_tensors="pt", **more
    )["pixel_values"]
    if name == "llava_onevision":
        ours = ours.transpose(0, 1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("frame_count", (2, 5))
@pytest.mark.parametrize("name", ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"))
def test_videos_equal_the_full_processors(tiny_checkpoints, name, frame_count):
    from transformers.video_utils import VideoMetadata

    family = load_family(Model(path=str(tiny_checkpoints[name])))
    frames = [noise_image(84, 56, seed) for seed in range(frame_count)]
    plan = family.plan_video((84, 56), frame_count, 2.0, PixelLimits(least=1, most=84 * 56))
    ours = family.encode_video(frames, plan)
    row = replace(make_row("row", "<video>Where is the seven?", 0), videos=(VideoSource(path="v.mp4"),))
    prompt = encode_prompt(family, row, 0, [ours], system=None, max_prompt_tokens=800)
    processor = full_processor(family)
    video = torch.stack([picture_tensor(frame) for frame in frames]).permute(0, 3, 1, 2)
    metadata = VideoMetadata(total_num_frames=frame_count, fps=2.0, frames_indices=list(range(frame_count)))
    theirs = processor(
        text=[prompt.text],
        videos=[video],
        video_metadata=[metadata],
        do_sample_frames=False,
        do_resize=False,
        return_tensors="pt",
    )
    torch.testing.assert_close(
        family.patches(ours, torch.device("cpu"), torch.float32), theirs["pixel_values_videos"], rtol=0, atol=1e-5
    )
    text, expected = (family.tokenizer.decode(ids) for ids in (prompt.token_ids_P, theirs["input_ids"][0]))
    if name == "qwen3_vl":  # in transformers 5, its processor leaves the template's own vision tokens around the whole
        expected = expected.replace("<|vision_start|><0.", "<0.").replace(
            "<|vision_end|><|vision_end|>", "<|vision_end|>"
        )
    assert text == expected
