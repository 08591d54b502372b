"""The right answers of rows, read for rewards. One that cannot be read is a DataError naming row and column.

Text in a row is read like a completion, so that a right answer may stand in <answer>...</answer>.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from tiercel.config.schema import Reward
from tiercel.errors import DataError
from tiercel.rewards.answers import LARGEST_COORDINATE, extract_answer, parse_box, parse_boxes, parse_number
from tiercel.rewards.boxes import is_proper
from tiercel.samples import Box, Sample

IN_PIXELS = "[x1, y1, x2, y2] in pixels of the original image"


def truth_of(sample: Sample, reward: Reward) -> Any:
    """The row's right answer, None where the row has none."""
    column = reward.answer_column or "answer"
    return sample.answer if column == "answer" else sample.columns.get(column)


def malformed(sample: Sample, reward: Reward, truth: Any, reason: str) -> DataError:
    column = reward.answer_column or "answer"
    shown = repr(truth) if len(repr(truth)) <= 80 else repr(truth)[:77] + "..."
    return DataError(f"row {sample.id}, column {column}: {shown} {reason} (reward {reward.name})", field=column)


def number_of(value: Any) -> Fraction | None:
    """A JSON number or the last number in a text. A float means the decimal it is written as."""
    if isinstance(value, str):
        return parse_number(extract_answer(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return Fraction(value)
    return Fraction(repr(value)) if isinstance(value, float) and math.isfinite(value) else None


def required_number(sample: Sample, reward: Reward, truth: Any) -> Fraction:
    number = number_of(truth)
    if number is None:
        raise malformed(sample, reward, truth, 'holds no number; write one such as 7, 0.5 or "3/4"')
    return number


def texts_of(sample: Sample, reward: Reward, truth: Any) -> list[str]:
    """The admissible answers: a text or number, or a list of them."""
    entries = truth if isinstance(truth, list | tuple) else [truth]
    if not entries or any(isinstance(each, bool) or not isinstance(each, str | int | float) for each in entries):
        raise malformed(sample, reward, truth, "is neither text nor a number, nor a list of them; write it in quotes")
    return [extract_answer(each) if isinstance(each, str) else str(each) for each in entries]


def required_box(sample: Sample, reward: Reward, truth: Any) -> Box:
    """A proper box on the row's first image."""
    boxes = _boxes(truth, only_one=True)
    if boxes is None or len(boxes) != 1:
        raise malformed(sample, reward, truth, f"is no box; write {IN_PIXELS}")
    _require_proper(sample, reward, truth, boxes)
    return boxes[0]


def required_boxes(sample: Sample, reward: Reward, truth: Any) -> list[Box]:
    """Proper boxes on the row's first image; an empty list says that there is nothing to find."""
    boxes = _boxes(truth, only_one=False)
    if boxes is None:
        raise malformed(sample, reward, truth, f"is no list of boxes; write [[x1, y1, x2, y2], ...], each {IN_PIXELS}")
    _require_proper(sample, reward, truth, boxes)
    return boxes


def _require_proper(sample: Sample, reward: Reward, truth: Any, boxes: Sequence[Box]) -> None:
    if not all(is_proper(box) for box in boxes):
        raise malformed(sample, reward, truth, "is an empty or inverted box; x1 < x2 and y1 < y2 are needed")
    if not sample.images:
        raise malformed(sample, reward, truth, "is a box, but the row has no image; add one to `images`")


def _boxes(value: Any, *, only_one: bool) -> list[Box] | None:
    """Boxes of a JSON value or of a text; None where it holds none."""
    if isinstance(value, str):
        text = extract_answer(value)
        first = parse_box(text)
        return None if first is None else [first] if only_one else parse_boxes(text)
    if not isinstance(value, list | tuple):
        return None
    if (one := _box(value)) is not None:
        return [one]
    boxes = [_box(each) for each in value]
    return None if only_one or None in boxes else boxes  # type: ignore[return-value]


def _box(value: Any) -> Box | None:
    """Four JSON numbers."""
    if not isinstance(value, list | tuple) or len(value) != 4:
        return None
    if any(isinstance(side, bool) or not isinstance(side, int | float) for side in value):
        return None
    if not all(abs(side) <= LARGEST_COORDINATE for side in value):  # NaN fails this too
        return None
    x1, y1, x2, y2 = (float(side) for side in value)
    return (x1, y1, x2, y2)
