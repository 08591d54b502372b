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
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from tiercel.algorithms.preference_sections import Ranking
from tiercel.config.data import FormatName
from tiercel.data.marks import BOX_MARK, REFERENCE_MARK, count_marks
from tiercel.data.record_values import given, is_truth
from tiercel.data.rows import RowDraft
from tiercel.data.texts import told
from tiercel.data.turns import answer_start
from tiercel.errors import DataError
from tiercel.reward_types import column
from tiercel.types import Row

Record = Mapping[str, Any]
T = TypeVar("T")
LABELS = ("label", "kto_tag")
REJECTED = ("rejected", "rejected_response", "rejected_messages")
_LAYOUT = "a pair needs `chosen` and `rejected`, or messages and `rejected`; docs/data.md shows each format"


def label_of(record: Record) -> tuple[bool, Record]:
    """Return whether the row's answer is good, and the record without its label. Raises DataError."""
    keys = [key for key in LABELS if given(record, key)]
    if len(keys) != 1:
        raise DataError(told("no label"), field="label")
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
        raise DataError(told("two chosen answers"), field="chosen")
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


def split_shared_turns(chosen: RowDraft, rejected: RowDraft) -> tuple[RowDraft, RowDraft]:
    """Divide the boxes and references that a pair lists once for both answers, as ms-swift does: first come those of
    the question, then those of the chosen answer, then those of the rejected one. Lists that fit each side alone
    stay."""
    question = chosen.messages[: answer_start(chosen.messages)]
    if question != rejected.messages[: answer_start(rejected.messages)]:
        return chosen, rejected

    def divided(mark: str, of_chosen: tuple[T, ...], of_rejected: tuple[T, ...]) -> tuple[tuple[T, ...], ...]:
        """Return the parts of both sides; the lists as they are if their length does not fit the marks."""
        asked = count_marks(question, mark)
        answered = count_marks(chosen.messages, mark)
        if len(of_chosen) != answered + count_marks(rejected.messages, mark) - asked:
            return of_chosen, of_rejected
        return of_chosen[:answered], of_rejected[:asked] + of_rejected[answered:]

    boxes = divided(BOX_MARK, chosen.boxes, rejected.boxes)
    images = divided(BOX_MARK, chosen.box_images, rejected.box_images)
    references = divided(REFERENCE_MARK, chosen.references, rejected.references)
    return (
        replace(chosen, boxes=boxes[0], box_images=images[0], references=references[0]),
        replace(rejected, boxes=boxes[1], box_images=images[1], references=references[1]),
    )


def paired(chosen: Row, rejected: Row) -> Row:
    """Make the row of a pair. Raises DataError if both sides are equal."""
    sides = [(side.messages, side.boxes, side.box_images, side.visuals) for side in (chosen, rejected)]
    if sides[0] == sides[1]:
        raise DataError("both answers are the same, so there is nothing to prefer", field="rejected")
    return replace(chosen, rejected=replace(rejected, columns=chosen.columns))


def no_pairs(record: Record) -> tuple[Record, Record]:
    """Refuse a pair of a format that is not among SIDES."""
    raise DataError("this format does not support pairs; use tiercel's own row format", field="rejected")


# For each format that supports pairs, the function that splits a pair into the records with the chosen and the rejected
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
}
