"""Judge single values of a record, and name a wrong one."""

import sys
from collections.abc import Mapping
from typing import Any

from tiercel.errors import DataError
from tiercel.message_text import brief

_LONGEST_REASON = 5000  # characters; a reason may name a path, which may have up to 4096


def shortened(text: str) -> str:
    """Shorten a reason or a field for bad_rows.jsonl, because it may quote text of the row."""
    return brief(text, _LONGEST_REASON)


def given(record: Mapping[str, Any], key: str) -> bool:
    """Return whether a key has a value other than null: Parquet writes null for a key that a row does not have."""
    return record.get(key) is not None


def is_filled(value: Any) -> bool:
    """Return whether a value says anything: tables write null, an empty text, list or object, or an object of nulls
    for what a row does not have."""
    if value is None or isinstance(value, str | list):
        return bool(value)
    return not isinstance(value, dict | Mapping) or any(each is not None for each in value.values())


def whole(value: Any) -> Any:
    """Return a whole number as an int, also if a table holds it as a float, as in a column in which some are missing;
    any other value stays as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_number(value: Any) -> bool:
    """Return whether a value is a finite int or float. A bool is neither."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_truth(value: Any) -> bool:
    """Return whether a value means yes or no: a bool, 1 or 0."""
    return type(value) in (bool, int, float) and value in (0, 1)


def wrong_value(value: Any, wanted: str, field: str) -> DataError:
    """Make the error that shows a wrong value and says what is wanted instead."""
    return DataError(f"is {brief_value(value)}, but {wanted}", field=field)


def brief_value(value: Any) -> str:
    """Shorten a value for a message."""
    if value is None:
        return "missing"
    return brief(repr(value), 80) if not isinstance(value, bytes) else "bytes"
