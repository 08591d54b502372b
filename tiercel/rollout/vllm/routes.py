"""What a vLLM server is asked for: a chat, or the tokens themselves.

A prompt of one turn is requested as a chat, which every vLLM since 0.11 answers. What follows a sampled turn is never
rendered again, so turns go by their token ids; vLLM since 0.32 has that route if it was started with
--enable-scale-out.
"""

import asyncio
import base64
import io
from collections.abc import Iterator
from typing import Any

from tiercel.models.families.base import Family
from tiercel.models.families.image_transforms import picture_image
from tiercel.rollout.vllm.http import CHAT, GENERATE
from tiercel.rollout.vllm.requests import PromptRequest, sampling_fields
from tiercel.types import EncodedImage, EncodedPrompt, Message


async def chat_body(family: Family, model: str, asked: PromptRequest, **fields: Any) -> dict[str, Any]:
    """Request completions of messages, which the server renders. `fields` are further parameters of sampling."""
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


def chat_messages(prompt: EncodedPrompt) -> list[dict[str, Any]]:
    """Convert the prompt's turns to messages of OpenAI's protocol, with the pictures as the family resized them."""
    pictures = iter(prompt.images)
    return [{"role": message.role, "content": _parts(message, pictures)} for message in prompt.messages]


def _parts(message: Message, pictures: Iterator[EncodedImage]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(message.content.split("<image>")):
        if number:
            parts.append({"type": "image_url", "image_url": {"url": _data_url(next(pictures))}})
        if text:
            parts.append({"type": "text", "text": text})
    return parts


def _data_url(image: EncodedImage) -> str:
    buffer = io.BytesIO()
    picture_image(image.views[0]).save(buffer, format="PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
