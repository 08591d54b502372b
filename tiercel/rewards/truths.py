"""The right answers of rows, read for rewards. One that cannot be read is a DataError naming row and column.

Text in a row is read like a completion, so that a right answer may stand in <answer>...</answer>.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tiercel.errors import DataError
from tiercel.rewards.answers import LARGEST_COORDINATE, extract_answer, parse_box, parse_boxes, parse_number
from tiercel.rewards.boxes import is_proper
from tiercel.samples import Box, Sample
from tiercel.shortening import brief

IN_PIXELS = "[x1, y1, x2, y2] in pixels of the original image"


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """The right answer of a row. Every reading raises DataError where the value is not of that kind."""

    value: Any  # as the row has it; not None
    sample: Sample
    column: str
    reward: str  # that asks

    def malformed(self, reason: str) -> DataError:
        """Return the error that names row, column and value."""
        place = f"row {self.sample.id}, column {self.column}"
        return DataError(f"{place}: {brief(repr(self.value), 80)} {reason} (reward {self.reward})", field=self.column)

    def number(self) -> Fraction:
        """Read a number, exactly."""
        number = number_of(self.value)
        if number is None:
            raise self.malformed('holds no number; write one such as 7, 0.5 or "3/4"')
        return number

    def texts(self) -> list[str]:
        """Read the admissible answers: a text or number, or a list of them."""
        entries = self.value if isinstance(self.value, list | tuple) else [self.value]
        if not entries or any(isinstance(each, bool) or not isinstance(each, str | int | float) for each in entries):
            raise self.malformed("is neither text nor a number, nor a list of them; write it in quotes")
        return [extract_answer(each) if isinstance(each, str) else str(each) for each in entries]

    def box(self) -> Box:
        """Read a proper box on the row's first image."""
        boxes = _boxes(self.value, only_one=True)
        if boxes is None or len(boxes) != 1:
            raise self.malformed(f"is no box; write {IN_PIXELS}")
        self._require_proper(boxes)
        return boxes[0]

    def boxes(self) -> list[Box]:
        """Read proper boxes on the row's first image; an empty list says that there is nothing to find."""
        boxes = _boxes(self.value, only_one=False)
        if boxes is None:
            raise self.malformed(f"is no list of boxes; write [[x1, y1, x2, y2], ...], each {IN_PIXELS}")
        self._require_proper(boxes)
        return boxes

    def _require_proper(self, boxes: Sequence[Box]) -> None:
        if not all(is_proper(box) for box in boxes):
            raise self.malformed("is an empty or inverted box; x1 < x2 and y1 < y2 are needed")
        if not self.sample.images:
            raise self.malformed("is a box, but the row has no image; add one to `images`")


def number_of(value: Any) -> Fraction | None:
    """Read a JSON number or the last number in a text. A float means the decimal it is written as."""
    if isinstance(value, str):
        return parse_number(extract_answer(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return Fraction(value)
    return Fraction(repr(value)) if isinstance(value, float) and math.isfinite(value) else None


def _boxes(value: Any, *, only_one: bool) -> list[Box] | None:
    """Read boxes from a JSON value or a text; None where it holds none."""
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
    """Read four JSON numbers."""
    if not isinstance(value, list | tuple) or len(value) != 4:
        return None
    if any(isinstance(side, bool) or not isinstance(side, int | float) for side in value):
        return None
    if not all(abs(side) <= LARGEST_COORDINATE for side in value):  # NaN fails this too
        return None
    x1, y1, x2, y2 = (float(side) for side in value)
    return (x1, y1, x2, y2)
