"""Rename columns of rows to what the formats expect, and check that JSON and UTF-8 can hold their values.

What each format reads from its columns, such as TRL's, is in converters.py.
"""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tiercel.data.records import DEEPEST, Record
from tiercel.data.texts import told
from tiercel.errors import DataError
from tiercel.reward_types import column

_MOST_NAMED = 20  # the most columns in a message


def named(record: Record, column_names: Mapping[str, str]) -> Record:
    """Copy a record with some columns under other names. `column_names` maps each new name to the name in the row. A
    column that the row does not have is skipped. If it is null, the row's own column of the new name is something else,
    and is left out. A value inside another column is copied and also stays there."""
    found = {name: value for name, given in column_names.items() if (value := column(record.value, given)) is not None}
    moved = {column_names[name] for name in found}
    null = {name for name, given in column_names.items() if name not in found and _is_null(record.value, given)}
    kept = {key: value for key, value in record.value.items() if key not in moved and key not in null}
    return replace(record, value={**kept, **found})


def _is_null(value: Any, given: str) -> bool:
    """Return whether a column, or a value inside another column, is there and null."""
    for key in (given,) if given in value else given.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return False
        value = value[key]
    return value is None


def lacking(record: Record, column_names: Mapping[str, str]) -> list[str]:
    """List the columns that data.columns names but the row does not have."""
    return [given for given in column_names.values() if column(record.value, given) is None]


def require_columns(
    records: Sequence[Record], column_names: Mapping[str, str], file: str, *, is_whole: bool = True
) -> None:
    """Raise DataError if no row has a column that data.columns names, or if it names one column twice. Unless the
    records are the whole file, pictures and videos may come in later ones."""
    for name, given in column_names.items():
        if others := [other for other in column_names if other != name and column_names[other] == given]:
            raise DataError(told("one column twice", file, name, others[0], given), field="columns")
    for name, given in column_names.items():
        if any(given in record.value or column(record.value, given) is not None for record in records):
            continue
        if name in VISUALS and not is_whole:
            continue
        there = list(dict.fromkeys(key for record in records for key in record.value))
        turned = f"; if {name} is the name in the file, use {{{given}: {name}}}" if name in there else ""
        known = ", ".join(there[:_MOST_NAMED])
        raise DataError(told("no such column", file, name, given, len(records), turned, known), field="columns")


VISUALS = ("images", "image", "videos", "video", "rejected_images", "rejected_videos")
_ALWAYS_PLAIN = frozenset({int, bool, type(None)})


def require_plain(record: Mapping[str, Any]) -> None:
    """Raise DataError for a value that JSON or UTF-8 cannot hold. Images and videos are checked elsewhere."""
    for key, value in record.items():
        _require_text(key, "row")
        if key not in VISUALS:
            require_plain_value(value, key or "row", DEEPEST)


def missing_numbers(record: Mapping[str, Any]) -> dict[str, str]:
    """Map each column that holds nan, with which tables of pandas say that a number is missing, to that word."""
    return {key: "float " + str(value) for key, value in record.items() if type(value) is float and math.isnan(value)}


def foreign_columns(record: Mapping[str, Any], read: Container[str]) -> dict[str, str]:
    """Map each column whose value has a type that JSON does not know, such as bytes or a date, to that type, or to the
    number if it is not finite; skip the columns in `read`. Images and videos are read elsewhere."""
    kinds = {key: _foreign(value, DEEPEST) for key, value in record.items() if key not in read}
    kinds = {key: kind for key, kind in kinds.items() if key not in VISUALS}
    return {key: kind for key, kind in kinds.items() if kind is not None}


def _foreign(value: Any, levels: int) -> str | None:
    kind = type(value)
    if kind is float and not math.isfinite(value):
        return "float " + str(value)  # nan, with which tables of pandas say that a number is missing
    if kind in _ALWAYS_PLAIN or kind is str or kind is float or levels == 0:
        return None
    if kind is not list and kind is not dict:
        return kind.__name__
    inner = (_foreign(item, levels - 1) for item in (value.values() if kind is dict else value))
    return next((found for found in inner if found is not None), None)


def require_plain_value(value: Any, field: str, levels: int) -> None:
    """Raise DataError if JSON or UTF-8 cannot hold the value of a field, or if it has more than `levels` levels."""
    kind = type(value)
    if kind is str:
        _require_text(value, field)
    elif kind is float:
        if not math.isfinite(value):
            raise DataError(f"is {value}, but must be a finite number", field=field)
    elif kind is list or kind is dict:
        if levels == 0:
            raise DataError(f"is part of a value nested more than {DEEPEST} levels deep", field=field[:40])
        for key, item in value.items() if kind is dict else enumerate(value):
            if isinstance(key, str):
                _require_text(key, field)
            if type(item) not in _ALWAYS_PLAIN:
                require_plain_value(item, f"{field}.{key}" if kind is dict else f"{field}[{key}]", levels - 1)
    elif kind not in _ALWAYS_PLAIN:
        raise DataError(f"has a value of type {kind.__name__}, which JSON does not have; store it as text", field=field)


def _require_text(text: str, field: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError("contains half of a surrogate pair, which is not text", field=field) from error
