"""Values of rows that JSON and UTF-8 can hold."""

import math
from collections.abc import Mapping
from typing import Any

from tiercel.errors import DataError

_DEEPEST = 64  # levels of a value; deeper ones could not be read again from the files that tiercel writes
_ALWAYS_PLAIN = frozenset({int, bool, type(None)})


def require_plain(record: Mapping[str, Any]) -> None:
    """Raise DataError for a value that JSON or UTF-8 cannot hold. Images and videos are checked elsewhere."""
    for key, value in record.items():
        _require_text(key, "row")
        if key not in ("images", "image", "videos", "video"):
            require_plain_value(value, key or "row", _DEEPEST)


def require_plain_value(value: Any, field: str, levels: int) -> None:
    """Raise DataError for a value of a field that JSON or UTF-8 cannot hold, or with more levels."""
    kind = type(value)
    if kind is str:
        _require_text(value, field)
    elif kind is float:
        if not math.isfinite(value):
            raise DataError(f"is {value}; only finite numbers are read", field=field)
    elif kind is list or kind is dict:
        if levels == 0:
            raise DataError(f"is part of a value nested more than {_DEEPEST} levels deep", field=field[:40])
        for key, item in value.items() if kind is dict else enumerate(value):
            if isinstance(key, str):
                _require_text(key, field)
            if type(item) not in _ALWAYS_PLAIN:
                require_plain_value(item, f"{field}.{key}" if kind is dict else f"{field}[{key}]", levels - 1)
    elif kind not in _ALWAYS_PLAIN:
        raise DataError(f"has a value of type {kind.__name__}, which JSON does not know; write it as text", field=field)


def _require_text(text: str, field: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError("contains half of a surrogate pair, which is not text", field=field) from error
