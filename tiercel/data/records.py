"""A record: one object of a file of rows, or the reason why it cannot be read; and strict JSON."""

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tiercel.data.texts import told

_SHOWN_BYTES = 500  # shown of a line that cannot be read
DEEPEST = 64  # the most levels of a value; a deeper one could not be read again from the files that tiercel writes


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One object of a file, or the reason why it cannot be read."""

    line: int
    value: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    text: str = ""  # the beginning of what could not be read
    is_plain: bool = False  # known to hold nothing that `columns.require_plain` would refuse


def record_of_line(data: bytes, line: int) -> Record | None:
    """Read a line of a JSON Lines file; None if it is blank."""
    if line == 1:
        data = data.removeprefix(b"\xef\xbb\xbf")
    return record_of_json(data, line) if data.strip() else None


def record_of_json(data: bytes, line: int) -> Record:
    """Read a JSON object."""
    try:
        return record_of_object(loads(data), line, is_plain=_is_plain(data))
    except (ValueError, RecursionError) as error:
        begin = data[:_SHOWN_BYTES].decode(errors="replace").rstrip()
        return Record(line=line, problem=_row_problem(error), text=begin)


def _is_plain(data: bytes) -> bool:
    """Return True only if JSON that could be read has no half of a surrogate pair, which only an escape can write, and
    is not nested too deeply."""
    return b"\\u" not in data and data.count(b"[") + data.count(b"{") <= DEEPEST


def record_of_object(value: Any, line: int, *, is_plain: bool = False) -> Record:
    """Return a JSON value as a record; only an object can be one."""
    if isinstance(value, dict):
        return Record(line=line, value=value, is_plain=is_plain)
    return Record(line=line, problem=f"is a JSON {kind_of(value)}, but a row must be an object")


def loads(data: bytes) -> Any:
    """Read JSON strictly: UTF-8, finite numbers, each key once. Raises ValueError and RecursionError."""
    return _DECODER.decode(data.decode("utf-8"))


def records_of_list(data: bytes) -> list[Record] | None:
    """Read a JSON list in which not every value can be read; None if not even their ends can be found."""
    try:
        text, records = data.decode("utf-8").strip(), list[Record]()
        place = 1
        while True:
            start = _SPACE.match(text, place).end()  # type: ignore[union-attr]
            _, place = _LENIENT.raw_decode(text, start)
            records.append(record_of_json(text[start:place].encode(), len(records) + 1))
            place = _SPACE.match(text, place).end()  # type: ignore[union-attr]
            if text[place] != ",":
                return records if text[place] == "]" and place + 1 == len(text) else None
            place += 1
    except (ValueError, IndexError, RecursionError):
        return None


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its keys. Raises ValueError if a key is given twice, because only one value could be read."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name = next(name for name in found if sum(key == name for key, _ in pairs) > 1)
        raise ValueError(f"the key {name!r} is set twice; keep one")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is outside the range of numbers")
    return value


_SPACE = re.compile(r"[ \t\r\n]*")
_LENIENT = json.JSONDecoder(strict=False, parse_int=str, parse_float=str)
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_each_once)


def _row_problem(error: Exception) -> str:
    if not isinstance(error, json.JSONDecodeError):
        return json_problem(error)
    if error.doc.strip() in ("[", "{", "[{"):
        return "begins JSON of several lines, but a row must be a line of its own; if the file is a list, name it .json"
    end = len(error.doc.rstrip())
    said, place = error.msg.removesuffix(" at"), f"character {min(error.pos, end) + 1} of the line"
    if error.pos >= end or said.startswith("Unterminated"):
        return f"is not valid JSON: {said} at {place}; was it cut short?"
    return f"is not valid JSON: {said} at {place}"


def json_problem(error: Exception) -> str:
    """Return why JSON cannot be read."""
    if isinstance(error, UnicodeDecodeError):
        return told("not UTF-8", error.start)
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    return f"is not valid JSON: {error}"


def kind_of(value: Any) -> str:
    """Return what JSON calls a value."""
    kinds = {list: "list", dict: "object", str: "text", bool: "boolean", int: "number", float: "number"}
    return kinds.get(type(value), "null")
