"""Reading an answer out of a completion. Training and evaluation use this one parser; it imports no torch.

Nothing here guesses: what cannot be read is None.
"""

import functools
import re
import string
from collections.abc import Sequence
from fractions import Fraction
from itertools import islice

from tiercel.samples import Box

LETTERS = tuple(string.ascii_uppercase)

_OPEN_ANSWER = "<answer>"
_CLOSE_ANSWER = "</answer>"
_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)

_INTEGER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"""
    (?<![A-Za-z0-9_.])  # neither inside a word nor after a point; the sign of "3-4" belongs to no number
    (?P<sign>[-+\u2212]?)
    (?:
        \\[dt]?frac\{{(?P<top>[0-9]+)\}}\{{(?P<bottom>[0-9]+)\}}
      | (?:(?P<whole>[0-9]+)[ ])?(?P<numerator>{_DECIMAL})[ ]?/[ ]?(?P<denominator>{_DECIMAL})
      | (?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>[-+]?[0-9]+))?
    )
    """,
    re.VERBOSE,
)
_LONGEST_NUMBER = 64  # characters, and 3 digits of exponent: exact arithmetic on more would cost seconds
_LARGEST_EXPONENT = 999

_COORDINATE = r"\s*([-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)\s*"
_BOX = re.compile(
    rf"[\[(]{_COORDINATE},{_COORDINATE},{_COORDINATE},{_COORDINATE}[\])]"
    rf"|[\[(]{_COORDINATE},{_COORDINATE}[\])]\s*(?:,\s*)?[\[(]{_COORDINATE},{_COORDINATE}[\])]"
)
_POINT = re.compile(rf"[\[(]{_COORDINATE},{_COORDINATE}[\])]|\bx\s*={_COORDINATE}(?:,\s*)?y\s*={_COORDINATE}")
LARGEST_COORDINATE = 1e12
MOST_BOXES = 200  # matching them takes time that grows with the cube


def extract_answer(completion: str) -> str:
    """Return the content of the last complete <answer>...</answer>, stripped.

    Where there is none: the whole completion without its thought, stripped. A thought is <think>...</think>, all
    that comes before a lone </think> (chat templates may write the opening tag), and all that comes after a lone
    <think> (it was cut off).
    """
    last_close = completion.rfind(_CLOSE_ANSWER)
    start = completion.rfind(_OPEN_ANSWER, 0, last_close) if last_close >= 0 else -1
    if start >= 0:
        end = completion.index(_CLOSE_ANSWER, start)
        return completion[start + len(_OPEN_ANSWER) : end].strip()
    closed, tag, rest = completion.rpartition("</think>")  # `rest` holds no end of a thought
    unthought = _THOUGHT.sub("", closed + tag).rpartition("</think>")[2] + rest
    return unthought.partition("<think>")[0].strip()


def parse_number(text: str) -> Fraction | None:
    """Read the last number in a text, exactly; None where there is none.

    Reads integers, decimals (1.5, .5, 1e-3), thousands separators (1,234), fractions (3/4, 2 1/2, \\frac{3}{4}) and
    signs. What stands around the number is a unit and is dropped, a percent sign too: "50%" is 50.
    """
    found = list(_NUMBER.finditer(text))
    if not found or len(found[-1].group()) > _LONGEST_NUMBER:
        return None
    last = found[-1]
    if last["exponent"] is not None and abs(int(last["exponent"])) > _LARGEST_EXPONENT:
        return None
    if last["decimal"] is not None:
        value = _decimal(last["decimal"]) * Fraction(10) ** int(last["exponent"] or 0)
    else:
        denominator = _decimal(last["bottom"] or last["denominator"])
        if denominator == 0:
            return None
        value = int(last["whole"] or 0) + _decimal(last["top"] or last["numerator"]) / denominator
    return value if last["sign"] in ("", "+") else -value


def _decimal(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))


def parse_choice(text: str, choices: Sequence[str] = LETTERS) -> str | None:
    """Read the choice that a text settles on, spelt as in `choices`; None where it settles on none.

    In this order: the whole text is a choice ("B", "(B)", "b.", "Option B"); it begins with one and a mark ("B. the
    dog", "(B) the dog"); one follows "answer", the last such ("The answer is B, not C"); it ends with one ("It must
    be B."). A choice of one letter is read in either case only where it is the whole text: "a" is also a word.
    """
    text = text.strip()
    if text in choices:
        return text
    for pattern, takes_last in _choice_patterns(tuple(choices)):
        found = list(pattern.finditer(text))
        if found:
            chosen = found[-1 if takes_last else 0]["choice"]
            return next((choice for choice in (chosen, *choices) if choice in choices and _same(choice, chosen)), None)
    return None


def _same(left: str, right: str) -> bool:
    return left.casefold() == right.casefold()


@functools.lru_cache(maxsize=64)
def _choice_patterns(choices: tuple[str, ...]) -> tuple[tuple[re.Pattern[str], bool], ...]:
    """Make the patterns in order of precedence, each with whether its last match counts instead of its first."""
    by_length = sorted(choices, key=len, reverse=True)  # "no" must not hide "none"
    any_case = "|".join(re.escape(choice) for choice in by_length)
    in_prose = "|".join(re.escape(choice) if len(choice) == 1 else f"(?i:{re.escape(choice)})" for choice in by_length)
    opening = r"[\s(\[{*\"'`]{0,16}"  # bounded, because a model may write spaces without end
    before = rf"{opening}(?:(?i:option|choice)\s{{1,16}})?{opening}"
    after = r"[\s)\]}*\"'`.,:;!\u3002]*"
    answer = r"(?:\b(?i:answer)(?:\s{1,16}(?i:is)\b)?\s{0,16}[:=]?|\\boxed)"
    return (
        (re.compile(rf"\A{before}(?P<choice>(?i:{any_case})){after}\Z"), False),
        (re.compile(rf"\A{before}(?P<choice>{in_prose})[)\]}}*]*[)\].:*](?=\s)"), False),
        (re.compile(rf"{answer}{before}(?P<choice>{in_prose})(?![A-Za-z0-9_])"), True),
        (re.compile(rf"(?<![A-Za-z0-9_])(?P<choice>{in_prose}){after}\Z"), True),
    )


def parse_boxes(text: str) -> list[Box]:
    """Read every list of four numbers in a text, as `parse_box` reads one; the first 200."""
    boxes = map(_box_of, islice(_BOX.finditer(text), MOST_BOXES))
    return [box for box in boxes if box is not None]


def parse_point(text: str) -> tuple[float, float] | None:
    """Read the first pair of numbers in a text: (x, y), [x, y], {"point_2d": [x, y]} or x=1, y=2; None where there
    is none, or where a box comes first."""
    found = _POINT.search(text)
    box = _BOX.search(text)
    if found is None or (box is not None and box.start() <= found.start()):
        return None
    x, y = (float(number) for number in found.groups() if number is not None)
    return (x, y) if _are_coordinates((x, y)) else None


def parse_box(text: str) -> Box | None:
    """Read the first list of four numbers in a text, as written; None where there is none.

    Reads [x1, y1, x2, y2], {"bbox_2d": [x1, y1, x2, y2]}, (x1,y1),(x2,y2) and the same between <|box_start|> and
    <|box_end|>. Corners are neither sorted nor clipped.
    """
    found = _BOX.search(text)
    return None if found is None else _box_of(found)


def _box_of(found: re.Match[str]) -> Box | None:
    x1, y1, x2, y2 = (float(number) for number in found.groups() if number is not None)
    return (x1, y1, x2, y2) if _are_coordinates((x1, y1, x2, y2)) else None


def _are_coordinates(numbers: Sequence[float]) -> bool:
    """Say whether arithmetic on the numbers stays finite; no picture has others."""
    return all(abs(number) <= LARGEST_COORDINATE for number in numbers)
