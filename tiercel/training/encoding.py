"""What loader workers do with a row: decode and resize its images, render and tokenise its turns."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tiercel.config.schema import Data
from tiercel.data.images import decode
from tiercel.data.videos import decode_video, open_video
from tiercel.models.family import Family
from tiercel.models.prompts import encode_conversation, encode_prompt
from tiercel.types import (
    EncodedConversation,
    EncodedImage,
    EncodedPrompt,
    ImagePlan,
    PixelLimits,
    Row,
    Size,
    VideoSource,
)


def prompt_encoder(family: Family, data: Data) -> Callable[[Row, int], EncodedPrompt]:
    """For GRPO and evaluation: rows as prompts to sample after."""
    return partial(_encode_prompt, family, data)


def conversation_encoder(family: Family, data: Data) -> Callable[[Row, int], EncodedConversation]:
    """For SFT: rows as conversations to train on."""
    return partial(_encode_conversation, family, data)


def row_images(family: Family, data: Data, row: Row) -> list[EncodedImage]:
    """A row's images and videos in the order of their marks, decoded and resized. Raises DataError."""
    root = Path(row.image_root)
    encoded = []
    for source in row.visuals:
        if isinstance(source, VideoSource):
            frames, fps = decode_video(source, root, data)
            encoded.append(family.encode_video(frames, fps, video_limits(data)))
        else:
            encoded.append(family.encode_image(decode(source, root, data.max_image_pixels), row.pixels))
    return encoded


def row_plans(family: Family, data: Data, row: Row, sizes: Sequence[Size]) -> list[ImagePlan]:
    """The same from the headers alone; `sizes` are the images'. Raises DataError."""
    left = iter(sizes)
    plans = []
    for source in row.visuals:
        if isinstance(source, VideoSource):
            header = open_video(source, Path(row.image_root), data)
            plans.append(family.plan_video(header.size, len(header.frame_numbers), header.fps, video_limits(data)))
        else:
            plans.append(family.plan_image(next(left), row.pixels))
    return plans


def video_limits(data: Data) -> PixelLimits:
    """Of each frame."""
    return PixelLimits(least=data.video.min_pixels, most=data.video.max_pixels)


def _encode_prompt(family: Family, data: Data, row: Row, index: int) -> EncodedPrompt:
    images = row_images(family, data, row)
    limit = data.max_prompt_tokens
    return encode_prompt(family, row, index, images, system=data.system, max_prompt_tokens=limit)


def _encode_conversation(family: Family, data: Data, row: Row, index: int) -> EncodedConversation:
    images = row_images(family, data, row)
    limit = data.max_prompt_tokens
    return encode_conversation(family, row, index, images, system=data.system, max_prompt_tokens=limit)
