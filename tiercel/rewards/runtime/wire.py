"""Encode samples as JSON lines, to send them to a reward's own process. Imports no torch."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tiercel.reward_types import RewardValue, Sample, Turn, decode_turn, images_of

LARGEST_VALUE = 3.4e38  # of a reward: advantages are computed in fp32


class NotJson(ValueError):
    """A row has a value that JSON cannot represent; the message names row and column."""


def encode_sample(sample: Sample) -> str:
    """Encode a sample as one line of JSON. Raises NotJson if a column of the row cannot be represented."""
    return as_line(asdict(sample), sample.id, {"answer": sample.answer, **sample.columns})


def as_line(fields: Mapping[str, Any], row_id: str, columns: Mapping[str, Any]) -> str:
    """Encode fields, which include a row's columns, as one line of JSON. Raises NotJson if a column cannot be
    represented."""
    try:
        return json.dumps(fields)
    except (TypeError, ValueError) as error:
        for column, value in columns.items():
            if not _is_json(value):
                raise NotJson(
                    f"row {row_id}, column {column}: a {type(value).__name__} cannot be passed to your code as JSON "
                    f"({error}); store it as text, a number or a list"
                ) from error
        raise


def decode_sample(fields: Mapping[str, Any]) -> Sample:
    """Decode a sample that `encode_sample` wrote; its lists of sizes become tuples again."""
    outcome = fields["outcome"]
    decoded = {
        "images": images_of(fields["images"]),
        "messages": tuple(Turn(**turn) for turn in fields["messages"]),
        "turns": tuple(decode_turn(turn) for turn in fields["turns"]),
        "outcome": None if outcome is None else RewardValue(**outcome),
    }
    return Sample(**{**fields, **decoded})


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
