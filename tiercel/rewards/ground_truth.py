"""Read the right answers of rows for rewards. One that cannot be read raises DataError, which names row and column.

Text in a row is read like a completion, so that a right answer may be inside <answer>...</answer>.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

from tiercel.errors import DataError
from tiercel.geometry import misfit, to_pixels
from tiercel.message_text import brief
from tiercel.reward_types import Box, Sample, SampleImage
from tiercel.rewards.answers import LARGEST_COORDINATE, extract_answer, parse_box, parse_boxes
from tiercel.rewards.boxes import is_proper
from tiercel.rewards.numbers import sure_number

IN_PIXELS = "[x1, y1, x2, y2] in pixels of the original image, or as data.boxes says"

LIST_OR_SEVERAL = (
    'may be one answer that is a list, or several right answers; make each a text: one as ["[1, 2]"], several as '
    '["1", "2"]'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """The right answer of a row. Every method that reads it raises DataError if the value is not of that kind."""

    value: Any  # as the row has it; not None
    sample: Sample
    column: str
    reward: str  # the reward that asks

    def malformed(self, reason: str) -> DataError:
        """Return the error that names row, column and value."""
        place = f"row {self.sample.id}, column {self.column}"
        return DataError(f"{place}: {brief(repr(self.value), 80)} {reason} (reward {self.reward})", field=self.column)

    def number(self) -> Fraction:
        """Read an exact number."""
        number = number_of(self.value)
        if number is None:
            raise self.malformed('does not contain a number, or not a clear one; use one such as 7, 0.5 or "3/4"')
        return number

    def texts(self) -> list[str]:
        """Read the accepted answers: a text or number, or a list of them."""
        entries = self.value if isinstance(self.value, list | tuple) else [self.value]
        if not entries or any(isinstance(each, bool) or not isinstance(each, str | int | float) for each in entries):
            raise self.malformed("is not text, a number or a list of them; put it in quotes")
        if is_list_of_numbers(self.value):
            raise self.malformed(LIST_OR_SEVERAL)
        return [text for each in entries for text in _texts_of(each)]

    def box(self) -> Box:
        """Read a proper box on `picture`, in its pixels."""
        boxes = _boxes(self.value, only_one=True)
        if boxes is None or len(boxes) != 1:
            raise self.malformed(f"is not a box; use {IN_PIXELS}")
        return self._on_picture(boxes)[0]

    def boxes(self) -> list[Box]:
        """Read proper boxes on `picture`, in its pixels; an empty list means that there is nothing to find."""
        boxes = _boxes(self.value, only_one=False)
        if boxes is None:
            raise self.malformed(f"is not a list of boxes; use [[x1, y1, x2, y2], ...], each {IN_PIXELS}")
        return self._on_picture(boxes)

    @property
    def picture(self) -> SampleImage:
        """Return the picture that the boxes of both the row's answer and the model's answer lie on."""
        images, number = self.sample.images, self.sample.answer_image
        if not images:
            raise self.malformed("is a box, but the row has no image; add one to `images`")
        if number is None:
            if any(image != replace(images[0], path=image.path) for image in images):
                raise self.malformed("is a box on one of several images; give its number, from 0, as `answer_image`")
            number = 0
        if number >= len(images):
            raise self.malformed(f"is a box on image {number}, which the prompt does not have (counted from 0)")
        return images[number]

    def _on_picture(self, boxes: Sequence[Box]) -> list[Box]:
        if not all(is_proper(box) for box in boxes):
            raise self.malformed("is an empty or inverted box; it must have x1 < x2 and y1 < y2")
        size, space = self.picture.original_size, self.sample.answer_space
        found = [to_pixels(box, space, size) for box in boxes]
        for box in found:
            if problem := misfit(box, space, size):
                raise self.malformed(problem)
        return found


def is_list_of_numbers(value: Any) -> bool:
    """Return whether a right answer is several numbers, which most formats of rows make of text that is such a list."""
    return isinstance(value, list | tuple) and len(value) > 1 and all(type(each) in (int, float) for each in value)


def _texts_of(entry: str | float) -> list[str]:
    """Return an entry as a completion may write it; 7.0 is also 7, because a column of whole numbers with a missing
    value is read as floats."""
    if isinstance(entry, float):
        return [str(entry), format(Decimal(repr(entry)).normalize(), "f")]
    return [extract_answer(entry) if isinstance(entry, str) else str(entry)]


def number_of(value: Any) -> Fraction | None:
    """Read a JSON number or the only number in a text. A float means the decimal that it is written as."""
    if isinstance(value, str):
        return sure_number(extract_answer(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return Fraction(value)
    return Fraction(repr(value)) if isinstance(value, float) and math.isfinite(value) else None


def _boxes(value: Any, *, only_one: bool) -> list[Box] | None:
    """Read boxes from a JSON value or a text; None if it has none."""
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
