"""An answer of the user's code as parts: texts, and pictures as files in base64."""

import base64
from collections.abc import Mapping
from typing import Any

LONGEST_TEXT = 1 << 20  # characters of an answer
LARGEST_PICTURES = 64 << 20  # bytes of an answer's pictures


class UnusableAnswer(ValueError):
    """Raised if the answer of the user's code cannot be handed to the policy. It ends the trajectory."""


def parts_of(value: Any) -> list[dict[str, str]]:
    """Convert an answer to parts, each {"text": ...} or {"image": base64}. Raises UnusableAnswer."""
    is_list = isinstance(value, list | tuple) and all(isinstance(part, Mapping) and "type" in part for part in value)
    given = value if is_list and value else [{"type": _kind(value), _kind(value): value}]
    parts = [_part(part) for part in given]
    texts = sum(len(part.get("text", "")) for part in parts)
    if texts > LONGEST_TEXT:
        raise UnusableAnswer(f"answered a text of {texts:,} characters; at most {LONGEST_TEXT:,} are taken")
    pictures = sum(len(part.get("image", "")) for part in parts) * 3 // 4
    if pictures > LARGEST_PICTURES:
        raise UnusableAnswer(f"answered pictures of {pictures:,} bytes; at most {LARGEST_PICTURES:,} are taken")
    return parts


def _kind(value: Any) -> str:
    return "image" if isinstance(value, bytes) or type(value).__module__.startswith("PIL.") else "text"


def _part(part: Mapping[str, Any]) -> dict[str, str]:
    kind = part["type"]
    if kind not in ("text", "image") or kind not in part:
        raise UnusableAnswer(
            f"answered a part with the type {kind!r} and the keys {sorted(map(str, part))}; a part is "
            '{"type": "text", "text": ...} or {"type": "image", "image": ...}'
        )
    value = part[kind]
    return {"text": str(value)} if kind == "text" else {"image": base64.b64encode(_file(value)).decode()}


def _file(picture: Any) -> bytes:
    """Return a picture as the bytes of a file. Bytes are returned as they are."""
    if isinstance(picture, bytes):
        return picture
    if _kind(picture) != "image":
        raise UnusableAnswer(
            f"answered a {type(picture).__name__} as a picture; give a PIL image, or the bytes of a file"
        )
    from tiercel.image_decoding import png_file  # only now, because it needs numpy

    try:
        return png_file(picture)
    except ValueError as error:
        raise UnusableAnswer(f"answered a picture, but {error}") from error
