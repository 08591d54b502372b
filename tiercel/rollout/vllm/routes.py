"""What a vLLM server is asked for: a chat, or the tokens themselves.

A prompt of one turn is requested as a chat, which every vLLM since 0.11 answers. What follows a sampled turn is never
rendered again, so turns go by their token ids; vLLM since 0.32 has that route if it was started with
--enable-scale-out.
"""

import asyncio
import base64
import io
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from tiercel.errors import DataError
from tiercel.models.families.base import Family
from tiercel.models.families.image_transforms import picture_image
from tiercel.rollout.vllm.http import CHAT, GENERATE
from tiercel.rollout.vllm.requests import PromptRequest, sampling_fields
from tiercel.types import VISUAL_MARK, EncodedImage, EncodedPrompt, ImagePlan, Message


async def chat_body(family: Family, model: str, asked: PromptRequest, **fields: Any) -> dict[str, Any]:
    """Request completions of messages, which the server renders. `fields` are further parameters of sampling. Raises
    DataError as `told_rate` does."""
    return {
        "model": model,
        # In a thread, because the event loop would wait while pictures become PNG files.
        "messages": await asyncio.to_thread(chat_messages, asked.prompt),
        "add_generation_prompt": True,
        "max_completion_tokens": asked.params.max_new_tokens,
        "logprobs": True,
        "top_logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # so that each logprob names its token
        **_video_fields(family, asked.prompt),
        **sampling_fields(family, asked.params, asked.seed),
        **fields,
    }


async def token_body(family: Family, model: str, asked: PromptRequest, **fields: Any) -> dict[str, Any]:
    """Request completions of token ids and pictures. `fields` are further parameters of sampling."""
    prompt, most = asked.prompt, asked.params.max_new_tokens
    urls = await asyncio.to_thread(lambda: [_data_url(image) for image in prompt.images])
    pictures = {"content_parts": [{"type": "image_url", "url": url} for url in urls]} if urls else {}
    sampling = {"max_tokens": most, "logprobs": 0, **sampling_fields(family, asked.params, asked.seed)}
    return {
        "model": model,
        "token_ids": family.unexpanded_token_ids(prompt.token_ids_P, [image.plan for image in prompt.images]),
        "return_token_ids": True,
        "sampling_params": sampling | fields,
        **pictures,
    }


BODIES = {CHAT: chat_body, GENERATE: token_body}  # by the path of the route


def told_rate(family: Family, row_id: str, plans: Sequence[ImagePlan]) -> float | None:
    """Return the frames per second to request for the videos of a row; None if it has none. Raises DataError if they
    have several, because vLLM takes one for a request."""
    videos = [plan for plan in plans if plan.fps is not None]
    if len(rates := sorted({plan.fps for plan in videos if plan.fps is not None})) > 1:
        raise DataError(
            f"row {row_id}: its videos have {rates[0]:g} and {rates[-1]:g} frames per second, but a request to a vLLM "
            "server has one rate; give them one fps, or set rollout.engine: vllm or local",
            field="videos",
        )
    return family.told_fps(max(videos, key=lambda plan: plan.frame_count)) if videos else None


def _video_fields(family: Family, prompt: EncodedPrompt) -> dict[str, Any]:
    """Return what a request with videos says of them: to take all frames, their rate, and a chat template that writes
    one placeholder for a video, without the tokens around it that come from the trainer's plan."""
    fps = told_rate(family, prompt.row.id, [image.plan for image in prompt.images])
    if fps is None:
        return {}
    assert family.video_marker is not None
    placeholder = family.tokenizer.convert_ids_to_tokens(family.placeholder_ids[1])
    template = family.checkpoint.chat_template.replace(family.video_marker, placeholder)
    return {"media_io_kwargs": {"video": {"num_frames": -1, "fps": fps}}, "chat_template": template}


def chat_messages(prompt: EncodedPrompt) -> list[dict[str, Any]]:
    """Convert the prompt's turns to messages of OpenAI's protocol, with pictures and frames as the family resized
    them."""
    visuals = iter(prompt.images)
    return [{"role": message.role, "content": _parts(message, visuals)} for message in prompt.messages]


def _parts(message: Message, visuals: Iterator[EncodedImage]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(VISUAL_MARK.split(message.content)):
        if number:
            visual = next(visuals)
            kind = "image_url" if visual.plan.fps is None else "video_url"
            parts.append({"type": kind, kind: {"url": _data_url(visual)}})
        if text:
            parts.append({"type": "text", "text": text})
    return parts


def _data_url(visual: EncodedImage) -> str:
    """Encode an image, or all frames of a video, without loss. vLLM reads each part of a "video/jpeg" as an image of
    any format."""
    if visual.plan.fps is None:
        return "data:image/png;base64," + _png(visual.views[0])
    return "data:video/jpeg;base64," + ",".join(map(_png, visual.views))


def _png(picture_YX3: Tensor) -> str:
    buffer = io.BytesIO()
    picture_image(picture_YX3).save(buffer, format="PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode()
