"""Rows that say which answer is better: a pair as two records of its format, a label taken from its record.

tiercel   messages that end with the chosen answer; rejected: the other answer, or what follows the last question,
          or a whole conversation
swift     messages with rejected_response, or rejected_messages; query with response
trl       prompt, chosen, rejected; or chosen and rejected with the prompt in both; prompt, completion, label
sharegpt  conversations, chosen, rejected; kto_tag
alpaca    instruction, chosen, rejected; kto_tag
rlhf_v    question, chosen, rejected, also as JSON in `text`

In each, rejected_images and rejected_videos name the pictures and videos of the rejected side if they are others.
"""

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tiercel.algorithms.preference_sections import Ranking
from tiercel.config.data import FormatName
from tiercel.data.rows import given, is_truth
from tiercel.errors import DataError
from tiercel.reward_types import column
from tiercel.types import Row

Record = Mapping[str, Any]
LABELS = ("label", "kto_tag")
REJECTED = ("rejected", "rejected_response", "rejected_messages")
_LAYOUT = "a pair needs `chosen` and `rejected`, or messages and `rejected`; docs/data.md shows each format"


def label_of(record: Record) -> tuple[bool, Record]:
    """Return whether the row's answer is good, and the record without its label. Raises DataError."""
    keys = [key for key in LABELS if given(record, key)]
    if len(keys) != 1:
        reason = "a labelled row needs `label` or `kto_tag`: true for a good answer, false for a bad one"
        raise DataError(reason, field="label")
    value = record[keys[0]]
    if not is_truth(value):
        raise DataError(f"is {value!r}, but must be true, false, 1 or 0", field=keys[0])
    return bool(value), without(record, *keys)


def wanted_margin(row: Row, ranking: Ranking) -> float:
    """Return by how much a pair's chosen answer should be better. Raises DataError if its column does not have a
    number."""
    name = ranking.margin_column
    if name is None:
        return ranking.margin
    value = column(row.columns, name)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise DataError(f"is {value!r}, but must be a number, because ranking.margin_column names it", field=name)
    return ranking.margin + value


def without(record: Record, *keys: str) -> dict[str, Any]:
    """Copy a record without some keys."""
    return {key: value for key, value in record.items() if key not in keys}


def pair_in_text(record: Record) -> Record | None:
    """Parse RLHF-V's JSON in `text`; None if there is none."""
    try:
        inner = json.loads(record["text"]) if isinstance(record.get("text"), str) else None
    except (ValueError, RecursionError):
        return None
    return inner if isinstance(inner, dict) and {"question", "chosen", "rejected"} <= inner.keys() else None


def _of_messages(record: Record) -> tuple[Record, Record]:
    """Split messages, or ms-swift's query and response, that come with another answer."""
    keys = [key for key in REJECTED if given(record, key)]
    if not keys:
        raise DataError(f"is missing; {_LAYOUT}", field="rejected")
    if len(keys) > 1:
        raise DataError(f"is set more than once, as {' and '.join(keys)}; keep one", field="rejected")
    chosen, other = _visuals_apart(without(record, *REJECTED))
    value = record[keys[0]]
    if not given(record, "messages"):
        return chosen, {**other, "response": value}
    turns = record["messages"]
    if not isinstance(turns, list):
        return chosen, other  # the converter reports what is wrong
    if isinstance(value, str):
        value = [{"role": "assistant", "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError("must be the rejected answer, or a list of turns", field=keys[0])
    is_answered = bool(turns) and _role(turns[-1]) == "assistant"
    if is_answered and given(record, "chosen") and _said(record["chosen"]) != _said(turns):
        reason = "differs from the answer in messages; a pair has one chosen answer, so remove one of them"
        raise DataError(reason, field="chosen")
    last = max((place for place, turn in enumerate(turns) if _role(turn) == "user"), default=-1)
    whole = any(_role(turn) == "user" for turn in value)
    return chosen, {**other, "messages": value if whole else [*turns[: last + 1], *value]}


def _of_answers(record: Record, key: str) -> tuple[Record, Record]:
    """Split two answers of a format that expects its answer under `key`."""
    return _each(record, lambda rest, answer: {**rest, key: answer})


def _of_sharegpt(record: Record) -> tuple[Record, Record]:
    turns = record.get("conversations")
    before = turns if isinstance(turns, list) else []
    return _each(record, lambda rest, answer: {**rest, "conversations": [*before, answer]})


def _of_rlhf_v(record: Record) -> tuple[Record, Record]:
    inner = pair_in_text(record)
    return _of_answers(record if inner is None else {**without(record, "text"), **inner}, "completion")


def _each(record: Record, with_answer: Callable[[Record, Any], Record]) -> tuple[Record, Record]:
    """Put each of the two answers in place. `with_answer` makes a record of the rest and an answer."""
    for key in ("chosen", "rejected"):
        if not given(record, key):
            raise DataError(f"is missing; {_LAYOUT}", field=key)
    rest, other = _visuals_apart(without(record, "chosen", "rejected"))
    return with_answer(rest, record["chosen"]), with_answer(other, record["rejected"])


def _visuals_apart(record: Record) -> tuple[Record, Record]:
    """Return the record with the chosen side's pictures and videos, and the record with those of the rejected side."""
    chosen = other = without(record, "rejected_images", "rejected_videos")
    for kind in ("image", "video"):
        if given(record, f"rejected_{kind}s"):
            other = {**without(other, kind), f"{kind}s": record[f"rejected_{kind}s"]}
    return chosen, other


def _role(turn: Any) -> Any:
    return turn.get("role") if isinstance(turn, Mapping) else None


def _said(answer: Any) -> Any:
    """Return the content of the last turn; text is returned as it is."""
    last = answer[-1] if isinstance(answer, list) and answer else answer
    return last.get("content") if isinstance(last, Mapping) else last


def _no_pairs(record: Record) -> tuple[Record, Record]:
    raise DataError("this format does not support pairs; use tiercel's own row format", field="rejected")


# For each format, the function that splits a pair into the record with the chosen answer and the one with the rejected
# answer.
SIDES: dict[FormatName, Callable[[Record], tuple[Record, Record]]] = {
    "tiercel": _of_messages,
    "swift": _of_messages,
    "openai": _of_messages,
    "trl": partial(_of_answers, key="completion"),
    "sharegpt": _of_sharegpt,
    "vlm_r1": _of_sharegpt,
    "alpaca": partial(_of_answers, key="output"),
    "rlhf_v": _of_rlhf_v,
    "qa": _no_pairs,
    "verl": _no_pairs,
    "refcoco": _no_pairs,
}
