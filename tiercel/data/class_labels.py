"""Types of Hugging Face's datasets that Arrow files hold as something else: class labels, which are whole numbers whose
names stand beside the columns' types, and values of any type, which are JSON text."""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from tiercel.data.records import loads

_KEY = b"huggingface"  # of an Arrow schema, where datasets keeps the types of its columns


def class_labels(metadata: Mapping[bytes, bytes] | None) -> Mapping[str, Any]:
    """Return the columns with class labels in them, each with its type as datasets describes it. `metadata` is that of
    an Arrow schema."""
    return {name: kind for name, kind in _columns((metadata or {}).get(_KEY, b"")).items() if _has(kind, _is_label)}


def encoded_columns(metadata: Mapping[bytes, bytes] | None) -> Mapping[str, Any]:
    """Do as `class_labels` for columns with class labels or JSON text in them."""
    return _columns((metadata or {}).get(_KEY, b""))


@lru_cache(maxsize=64)
def _columns(description: bytes) -> Mapping[str, Any]:
    try:
        features = json.loads(description)["info"]["features"]
        return {name: kind for name, kind in features.items() if _has(kind, _is_label) or _has(kind, _is_json)}
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}


def _has(kind: Any, is_wanted: Callable[[Mapping[str, Any]], bool]) -> bool:
    if isinstance(kind, list):
        return any(_has(each, is_wanted) for each in kind)
    if not isinstance(kind, Mapping):
        return False
    return is_wanted(kind) or any(_has(each, is_wanted) for each in kind.values())


def _is_label(kind: Mapping[str, Any]) -> bool:
    return kind.get("_type") == "ClassLabel" and isinstance(kind.get("names"), list)


def _is_json(kind: Mapping[str, Any]) -> bool:
    return kind.get("_type") == "Json"


def decoded(record: Mapping[str, Any], columns: Mapping[str, Any], *, has_json: bool) -> dict[str, Any]:
    """Copy a record with the names of its class labels in their place. If `has_json`, JSON texts are also replaced by
    what they hold; rows that datasets itself has read have none. `columns` are those that have labels or JSON."""
    return {key: _decoded(value, columns[key], has_json) if key in columns else value for key, value in record.items()}


def _decoded(value: Any, kind: Any, has_json: bool) -> Any:
    """Replace what stands for something else in a value. A label of -1 is one that is not known, as in test splits, and
    becomes None."""
    if isinstance(kind, Mapping) and _is_label(kind) and type(value) is int:
        known = -1 <= value < len(kind["names"])
        return [*kind["names"], None][value] if known else value
    if isinstance(kind, Mapping) and _is_json(kind):
        return _of_json(value) if has_json and isinstance(value, str) else value
    if isinstance(kind, Mapping) and isinstance(kind.get("_type"), str) and "feature" in kind:
        kind = [kind["feature"]]  # a list
    if isinstance(value, list) and isinstance(kind, list) and len(kind) == 1:
        return [_decoded(each, kind[0], has_json) for each in value]
    if isinstance(kind, list) and len(kind) == 1 and isinstance(kind[0], Mapping):
        kind = {key: [each] for key, each in kind[0].items()}  # a list of objects may be an object of lists
    if isinstance(value, Mapping) and isinstance(kind, Mapping):
        return {key: _decoded(each, kind.get(key), has_json) for key, each in value.items()}
    return value


def _of_json(text: str) -> Any:
    """Return the text, the object or the list of objects that is written as JSON. Anything else stays as it is written:
    datasets writes the number 42 and the text "42" alike, and of the two a turn or an answer is the text."""
    try:
        found = loads(text.encode())
    except (ValueError, RecursionError):
        return text
    if isinstance(found, list) and found and all(type(each) in (int, float) for each in found):
        return json.dumps(found)  # as other files give a box; datasets writes it without spaces
    is_list = isinstance(found, list) and bool(found) and all(isinstance(each, dict) for each in found)
    return found if is_list or isinstance(found, str | dict) else text
