"""Values of columns that name pictures or videos, by the endings of the names."""

import re
from collections.abc import Mapping
from typing import Any, Literal

MediaKind = Literal["image", "video"]

_NAME = r"[^\n<>]{1,1000}\."
_NAMES: dict[MediaKind, re.Pattern[str]] = {
    "image": re.compile(rf"data:image/[^\n]*|{_NAME}(?:png|jpe?g|webp|gif|bmp|tiff?)", re.IGNORECASE),
    "video": re.compile(rf"{_NAME}(?:mp4|m4v|mkv|webm|avi|mov)", re.IGNORECASE),
}


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
