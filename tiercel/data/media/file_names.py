"""Values that name pictures or videos: columns, by the endings of the names, and parts of turns, by their type."""

import re
from collections.abc import Mapping
from typing import Any, Literal

MediaKind = Literal["image", "video"]

_NAME = r"[^\n<>]{1,1000}\."
_NAMES: dict[MediaKind, re.Pattern[str]] = {
    "image": re.compile(rf"data:image/[^\n]*|{_NAME}(?:png|jpe?g|webp|gif|bmp|tiff?)", re.IGNORECASE),
    "video": re.compile(rf"{_NAME}(?:mp4|m4v|mkv|webm|avi|mov)", re.IGNORECASE),
}

_ADDRESSES = {  # by type of part: what it shows, and the keys that may say where that lies
    "image": ("image", ("image", "url", "path", "base64", "source")),
    "image_url": ("image", ("image_url",)),
    "input_image": ("image", ("image_url",)),
    "video": ("video", ("video", "url", "path")),
}
ADDRESS_KEYS = frozenset(key for _, keys in _ADDRESSES.values() for key in keys)


def names_files(value: Any, kind: MediaKind) -> bool:
    """Return whether a value names one or more pictures, or videos."""
    if isinstance(value, list):
        return bool(value) and all(names_files(each, kind) for each in value)
    if isinstance(value, Mapping):
        value = value.get("path")
    return isinstance(value, str) and _NAMES[kind].fullmatch(value.strip()) is not None


def column_of_files(columns: Mapping[str, Any], kind: MediaKind) -> str | None:
    """Return the first column whose value names pictures, or videos; None if there is none."""
    return next((name for name, value in columns.items() if names_files(value, kind)), None)


def visual_of(part: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Return what a part of a turn shows, and the keys that may say where it lies; nothing for any other object."""
    kind = part.get("type")
    return _ADDRESSES.get(kind, ("", ())) if isinstance(kind, str) else ("", ())
