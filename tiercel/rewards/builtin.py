"""The built-in rewards: pure functions of a sample and its entry in the recipe.

Each reads the model's answer with answers.py and the right answer from the row: `answer`, or the column that
`answer_column` names. A row without a right answer gets None (the reward does not apply); a right answer that
cannot be read is a DataError naming row and column. Text in a row is read like a completion, so that a right answer
may stand in <answer>...</answer>.
"""

import math
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from tiercel.config.schema import Reward, RewardName
from tiercel.errors import DataError
from tiercel.rewards.answers import LETTERS, extract_answer, parse_box, parse_choice, parse_number
from tiercel.rewards.boxes import iou, is_proper, to_original
from tiercel.samples import Box, Sample

_INSIDE = r"(?:(?!</?{tag}>).)*"
DEFAULT_FORMAT = (
    rf"\s*(?:<think>{_INSIDE.format(tag='think')}</think>\s*)?<answer>{_INSIDE.format(tag='answer')}</answer>\s*"
)
_LARGEST_COORDINATE = 1e12


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltIn:
    """A built-in reward and the value from which on it calls a completion right (None: it does not tell)."""

    score: Callable[[Sample, Reward], float | None]
    correct_at: float | None


def format_reward(sample: Sample, reward: Reward) -> float:
    """1 where the whole completion matches `pattern` (a dot matches line ends too), else 0; needs no right answer.

    Without a pattern: one <answer>...</answer> at the end, before it at most one <think>...</think>.
    """
    return float(re.fullmatch(reward.pattern or DEFAULT_FORMAT, sample.completion, re.DOTALL) is not None)


def exact_reward(sample: Sample, reward: Reward) -> float | None:
    """1 where the answer is the row's text, else 0. Both stripped and in Unicode NFC; case and spelling count.

    The right answer is text or a number; a number is compared as Python writes it (7, 0.5).
    """
    truth = _truth(sample, reward)
    if truth is None:
        return None
    if isinstance(truth, bool) or not isinstance(truth, str | int | float):
        raise _malformed(sample, reward, truth, "is neither text nor a number; write it in quotes")
    wanted = extract_answer(truth) if isinstance(truth, str) else str(truth)
    return float(_normal_form(extract_answer(sample.completion)) == _normal_form(wanted))


def number_reward(sample: Sample, reward: Reward) -> float | None:
    """1 where the last number of the answer is within `tolerance` of the row's number, else 0.

    Exact: 0.1 is a tenth and 1/3 a third. The right answer is a number or text that holds one.
    """
    truth = _truth(sample, reward)
    if truth is None:
        return None
    wanted = _number(truth)
    if wanted is None:
        raise _malformed(sample, reward, truth, 'holds no number; write one such as 7, 0.5 or "3/4"')
    given = parse_number(extract_answer(sample.completion))
    tolerance = _number(reward.tolerance or 0)
    assert tolerance is not None
    return float(given is not None and abs(given - wanted) <= tolerance)


def choice_reward(sample: Sample, reward: Reward) -> float | None:
    """1 where the answer settles on the row's choice, else 0; the right answer is one of `choices` (default A to Z)."""
    truth = _truth(sample, reward)
    if truth is None:
        return None
    choices = LETTERS if reward.choices is None else reward.choices
    is_text = isinstance(truth, str | int) and not isinstance(truth, bool)
    wanted = parse_choice(extract_answer(str(truth)), choices) if is_text else None
    if wanted is None:
        shown = "a letter from A to Z" if reward.choices is None else f"one of {', '.join(choices)}"
        raise _malformed(sample, reward, truth, f"is not {shown}")
    return float(parse_choice(extract_answer(sample.completion), choices) == wanted)


def iou_reward(sample: Sample, reward: Reward) -> float | None:
    """Intersection over union of the answer's first box with the row's, 0 where the answer holds no box.

    The answer's box is in the model's coordinate space; the row's is in pixels of the original first image: four
    numbers [x1, y1, x2, y2], or text that holds a box.
    """
    truth = _truth(sample, reward)
    if truth is None:
        return None
    wanted = _box(truth)
    if wanted is None:
        raise _malformed(sample, reward, truth, "is no box; write [x1, y1, x2, y2] in pixels of the original image")
    if not is_proper(wanted):
        raise _malformed(sample, reward, truth, "is an empty or inverted box; x1 < x2 and y1 < y2 are needed")
    if not sample.images:
        raise _malformed(sample, reward, truth, "is a box, but the row has no image; add one to `images`")
    given = parse_box(extract_answer(sample.completion))
    if given is None:
        return 0.0
    image = sample.images[0]
    return iou(to_original(given, sample.coordinate_space, image.original_size, image.processed_size), wanted)


def length_reward(sample: Sample, reward: Reward) -> float:
    """1 up to `max_tokens` tokens, end token included, falling linearly to 0 at twice as many; no right answer."""
    assert reward.max_tokens is not None
    return min(1.0, max(0.0, 2.0 - sample.token_count / reward.max_tokens))


BUILTIN: dict[RewardName, BuiltIn] = {
    "format": BuiltIn(score=format_reward, correct_at=None),
    "exact": BuiltIn(score=exact_reward, correct_at=1.0),
    "number": BuiltIn(score=number_reward, correct_at=1.0),
    "choice": BuiltIn(score=choice_reward, correct_at=1.0),
    "iou": BuiltIn(score=iou_reward, correct_at=0.5),
    "length": BuiltIn(score=length_reward, correct_at=None),
}


def _truth(sample: Sample, reward: Reward) -> Any:
    """The row's right answer, None where the row has none."""
    column = reward.answer_column or "answer"
    return sample.answer if column == "answer" else sample.columns.get(column)


def _malformed(sample: Sample, reward: Reward, truth: Any, reason: str) -> DataError:
    column = reward.answer_column or "answer"
    shown = repr(truth) if len(repr(truth)) <= 80 else repr(truth)[:77] + "..."
    return DataError(f"row {sample.id}, column {column}: {shown} {reason} (reward {reward.name})", field=column)


def _normal_form(text: str) -> str:
    return unicodedata.normalize("NFC", text.strip())


def _number(value: Any) -> Fraction | None:
    """A JSON number or the last number in a text. A float means the decimal it is written as."""
    if isinstance(value, str):
        return parse_number(extract_answer(value))
    if isinstance(value, int) and not isinstance(value, bool):
        return Fraction(value)
    return Fraction(repr(value)) if isinstance(value, float) and math.isfinite(value) else None


def _box(value: Any) -> Box | None:
    """Four JSON numbers, or the first box in a text."""
    if isinstance(value, str):
        return parse_box(extract_answer(value))
    if not isinstance(value, list | tuple) or len(value) != 4:
        return None
    if any(isinstance(side, bool) or not isinstance(side, int | float) for side in value):
        return None
    if not all(abs(side) <= _LARGEST_COORDINATE for side in value):  # NaN fails this too
        return None
    x1, y1, x2, y2 = (float(side) for side in value)
    return (x1, y1, x2, y2)
