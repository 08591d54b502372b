"""Class labels of Hugging Face's datasets: whole numbers in the files, whose names stand beside the columns' types."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

_KEY = b"huggingface"  # of an Arrow schema, where datasets keeps the types of its columns


def class_labels(metadata: Mapping[bytes, bytes] | None) -> Mapping[str, Any]:
    """Return the columns with class labels in them, each with its type as datasets describes it. `metadata` is that of
    an Arrow schema."""
    return _columns((metadata or {}).get(_KEY, b""))


@lru_cache(maxsize=64)
def _columns(description: bytes) -> Mapping[str, Any]:
    try:
        features = json.loads(description)["info"]["features"]
        return {name: kind for name, kind in features.items() if _has_labels(kind)}
    except (ValueError, LookupError, TypeError, AttributeError):
        return {}


def _has_labels(kind: Any) -> bool:
    if isinstance(kind, list):
        return any(map(_has_labels, kind))
    if not isinstance(kind, Mapping):
        return False
    return _is_label(kind) or any(map(_has_labels, kind.values()))


def _is_label(kind: Mapping[str, Any]) -> bool:
    return kind.get("_type") == "ClassLabel" and isinstance(kind.get("names"), list)


def with_names(record: Mapping[str, Any], labels: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a record with the names of its class labels in their place. `labels` are the columns that have some."""
    return {key: _named(value, labels[key]) if key in labels else value for key, value in record.items()}


def _named(value: Any, kind: Any) -> Any:
    """Replace the labels in a value. A label of -1 is one that is not known, as in test splits, and becomes None."""
    if isinstance(kind, Mapping) and _is_label(kind) and type(value) is int:
        known = -1 <= value < len(kind["names"])
        return [*kind["names"], None][value] if known else value
    if isinstance(kind, Mapping) and isinstance(kind.get("_type"), str) and "feature" in kind:
        kind = [kind["feature"]]  # a list
    if isinstance(value, list) and isinstance(kind, list) and len(kind) == 1:
        return [_named(each, kind[0]) for each in value]
    if isinstance(kind, list) and len(kind) == 1 and isinstance(kind[0], Mapping):
        kind = {key: [each] for key, each in kind[0].items()}  # a list of objects may be an object of lists
    if isinstance(value, Mapping) and isinstance(kind, Mapping):
        return {key: _named(each, kind.get(key)) for key, each in value.items()}
    return value
