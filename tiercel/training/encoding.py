"""What loader workers do with a row: decode and resize its images, render and tokenise its turns."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tiercel.config.schema import Data
from tiercel.data.images import decode
from tiercel.models.family import Family
from tiercel.models.prompts import encode_conversation, encode_prompt
from tiercel.types import EncodedConversation, EncodedImage, EncodedPrompt, Row


def prompt_encoder(family: Family, data: Data) -> Callable[[Row, int], EncodedPrompt]:
    """For GRPO and evaluation: rows as prompts to sample after."""
    return partial(_encode_prompt, family, data)


def conversation_encoder(family: Family, data: Data) -> Callable[[Row, int], EncodedConversation]:
    """For SFT: rows as conversations to train on."""
    return partial(_encode_conversation, family, data)


def row_images(family: Family, data: Data, row: Row) -> list[EncodedImage]:
    """A row's pictures, decoded and resized. Raises DataError."""
    root = Path(row.image_root)
    return [family.encode_image(decode(source, root, data.max_image_pixels), row.pixels) for source in row.images]


def _encode_prompt(family: Family, data: Data, row: Row, index: int) -> EncodedPrompt:
    images = row_images(family, data, row)
    limit = data.max_prompt_tokens
    return encode_prompt(family, row, index, images, system=data.system, max_prompt_tokens=limit)


def _encode_conversation(family: Family, data: Data, row: Row, index: int) -> EncodedConversation:
    images = row_images(family, data, row)
    limit = data.max_prompt_tokens
    return encode_conversation(family, row, index, images, system=data.system, max_prompt_tokens=limit)
