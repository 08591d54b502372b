"""Read pictures that are embedded in rows: as base64 text, as a data: URL, or as parts of a message in OpenAI's
form."""

import base64
import binascii
import re
from collections.abc import Mapping
from typing import Any

from tiercel.data.media.images import require_path
from tiercel.errors import DataError
from tiercel.types import ImageSource

_DATA_URL = re.compile(r"data:[a-z0-9.+/-]*(?:;[a-z0-9=.-]+)*;base64,", re.IGNORECASE)
# How base64 of PNG, JPEG and WEBP begins. A path could begin in the same way, but would not be as long.
_BEGINNINGS = ("iVBORw0KGgo", "/9j/", "UklGR")
_SHORTEST = 64  # characters; even a picture of one pixel has more


def embedded_picture(text: str, field: str) -> bytes | None:
    """Return the bytes of a picture that is written as base64; None for any other text, such as a path. Raises
    DataError if the text begins as base64 but is not valid base64 to its end."""
    url = _DATA_URL.match(text)
    if url is None and (len(text) < _SHORTEST or not text.startswith(_BEGINNINGS) or "." in text[-6:]):
        return None
    try:
        return base64.b64decode("".join(text[url.end() if url else 0 :].split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(
            f"is a picture as {len(text):,} characters of base64, which is damaged: {error}", field=field
        ) from error


IMAGE_PARTS = ("image_url", "input_image")


def has_image_parts(messages: Any) -> bool:
    """Return whether any turn has a part with the address of an image."""
    turns = messages if isinstance(messages, list) else []
    contents = [turn.get("content") for turn in turns if isinstance(turn, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS for part in parts)


def read_image_parts(messages: Any, field: str) -> tuple[Any, tuple[ImageSource, ...]]:
    """Return the turns with {"type": "image"} in place of each part that has an address, and the images in the same
    order. Raises DataError for an address that cannot be read."""
    if not isinstance(messages, list):
        return messages, ()
    images: list[ImageSource] = []
    turns = []
    for number, turn in enumerate(messages):
        content = turn.get("content") if isinstance(turn, Mapping) else None
        if isinstance(content, list):
            turn = {**turn, "content": list(content)}
            for place, part in enumerate(content):
                kind = part.get("type") if isinstance(part, Mapping) else None
                if kind in IMAGE_PARTS:
                    images.append(_source(part.get("image_url"), f"{field}[{number}].content[{place}]"))
                    turn["content"][place] = {"type": "image"}
                elif kind == "input_text":
                    turn["content"][place] = {**part, "type": "text"}
        turns.append(turn)
    return turns, tuple(images)


def _source(value: Any, field: str) -> ImageSource:
    url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str):
        raise DataError('has no address, but must be {"url": ...}', field=field)
    if (data := embedded_picture(url, field)) is not None:
        return ImageSource(data=data)
    require_path(url, field)
    return ImageSource(path=url)
