"""Videos as vLLM gets them: frames without loss, and a rate from which it computes the trainer's prompt."""

import asyncio
import base64
import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from tests.tiny_models import make_row, noise_image
from tiercel.config.schema import Model
from tiercel.errors import DataError
from tiercel.models.families.loading import load_family
from tiercel.models.prompts import encode_prompt
from tiercel.rollout.sampler import SamplingParams
from tiercel.rollout.vllm.requests import PromptRequest, visual_data
from tiercel.rollout.vllm.routes import chat_body
from tiercel.types import ImageSource, PixelLimits, VideoSource

FRAMES = [noise_image(84, 56, seed) for seed in range(3)]
PICTURE = noise_image(56, 56, 9)


def prompt_of(family, *rates: float):
    """A picture, and after it a video for each rate."""
    limits = PixelLimits(least=28 * 28, most=84 * 56)
    row = make_row("row", f"<image>a{'<video>b' * len(rates)}", 0)
    row = replace(row, images=(ImageSource(path="i.png"),), videos=(VideoSource(path="v.mp4"),) * len(rates))
    plans = [family.plan_video((84, 56), len(FRAMES), rate, limits) for rate in rates]
    visuals = [family.encode_image(PICTURE), *(family.encode_video(FRAMES, plan) for plan in plans)]
    return encode_prompt(family, row, 0, visuals, system=None, max_prompt_tokens=400)


@pytest.fixture(params=("qwen2_vl", "qwen2_5_vl", "qwen3_vl"))
def family(request, tiny_checkpoints):
    return load_family(Model(path=str(tiny_checkpoints[request.param])))


def body_of(family, *rates: float):
    asked = PromptRequest(prompt=prompt_of(family, *rates), params=SamplingParams(max_new_tokens=1), seed=0)
    return asyncio.run(chat_body(family, "policy", asked))


def sent_frames(url: str) -> list[np.ndarray]:
    start, frames = url.split(",", 1)
    assert start == "data:video/jpeg;base64"
    return [np.array(Image.open(io.BytesIO(base64.b64decode(each)))) for each in frames.split(",")]


def test_in_process_it_gets_frames_and_their_numbers(family):
    prompt = prompt_of(family, 2.0)
    data = visual_data(family, prompt.images)
    ((frames, said),) = data["video"]
    assert np.array_equal(frames, np.stack([np.array(frame) for frame in FRAMES]))
    fps = family.told_fps(prompt.images[1].plan)
    assert said == {"fps": fps, "total_num_frames": 3, "frames_indices": [0, 1, 2], "do_sample_frames": False}
    assert np.array_equal(np.array(data["image"][0]), np.array(PICTURE))


def test_a_server_gets_the_same_frames_a_rate_and_a_template_of_one_placeholder(family):
    body = body_of(family, 2.0, 2.0)
    parts = body["messages"][-1]["content"]
    assert [part["type"] for part in parts] == ["image_url", "text", "video_url", "text", "video_url", "text"]
    for part in (parts[2], parts[4]):
        assert all(map(np.array_equal, sent_frames(part["video_url"]["url"]), FRAMES))
    fps = family.told_fps(prompt_of(family, 2.0).images[1].plan)
    assert body["media_io_kwargs"] == {"video": {"num_frames": -1, "fps": fps}}
    start = "<|vision_start|>" if family.name != "qwen3_vl" else "%}"
    assert f"{start}<|video_pad|>" in body["chat_template"]
    assert not {"media_io_kwargs", "chat_template"} & set(body_of(family))


def test_videos_of_several_rates_are_refused_by_a_server(family):
    with pytest.raises(DataError, match="row row: its videos have 2 and 3 frames per second") as error:
        body_of(family, 3.0, 2.0)
    assert error.value.field == "videos"
    assert len(visual_data(family, prompt_of(family, 3.0, 2.0).images)["video"]) == 2
