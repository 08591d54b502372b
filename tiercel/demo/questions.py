"""Questions about a sheet whose answers depend on the digit or the ink that is asked for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

import numpy as np

from tiercel.demo.sheets import INKS, Digit, Sheet

TEXTS = MappingProxyType(
    {
        "where": "Where is the {}?",
        "count": "How many {}s?",
        "sum": "What is the sum of the {} ones?",
        "left": "Which digit is left of the {}?",
    }
)
COUNTED = 0.7  # share of the counting questions that ask for a digit on the sheet


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """The solution of a question: what each digit of a sheet, from left to right, means for it, the answer (a number,
    or a place as column,row), and what a careless writer answers after the same notes."""

    notes: Sequence[str]
    answer: str
    slip: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question and its solution. `swapped` asks for another digit or ink, and has another answer."""

    kind: str
    text: str
    solution: Solution
    swapped: str


Solutions = Mapping[str, Solution]  # of one kind, by the question's text


def where(sheet: Sheet) -> Solutions:
    """Ask for the place of a digit that occurs once on the sheet."""
    return {
        TEXTS["where"].format(digit.value): Solution(
            notes=["here" if each is digit else "no" for each in sheet.digits],
            answer=digit.place,
            slip=",".join(reversed(digit.place.split(","))),
        )
        for digit in _single(sheet)
    }


def count(sheet: Sheet) -> Solutions:
    """Ask how often a digit occurs."""
    return {
        TEXTS["count"].format(value): _counted([digit.value == value for digit in sheet.digits]) for value in range(10)
    }


def add_up(sheet: Sheet) -> Solutions:
    """Ask for the sum of an ink's digits."""
    return {
        TEXTS["sum"].format(ink): _added([digit.value if digit.ink == ink else None for digit in sheet.digits])
        for ink in INKS
        if any(digit.ink == ink for digit in sheet.digits)
    }


def left_of(sheet: Sheet) -> Solutions:
    """Ask for the next digit to the left of one that occurs once on the sheet."""
    solutions = {}
    for neighbour, digit in zip(sheet.digits, sheet.digits[1:], strict=False):
        if digit in _single(sheet):
            notes = [str(neighbour.value) if each is digit else "no" for each in sheet.digits]
            solutions[TEXTS["left"].format(digit.value)] = Solution(
                notes=notes, answer=str(neighbour.value), slip=str(digit.value)
            )
    return solutions


KINDS: Mapping[str, Callable[[Sheet], Solutions]] = MappingProxyType(
    {"where": where, "count": count, "sum": add_up, "left": left_of}
)


def ask(sheet: Sheet, kind: str, generator: np.random.Generator) -> Question | None:
    """Draw a question of a kind. Returns None if the sheet does not allow two of them with different answers."""
    solutions = KINDS[kind](sheet)
    texts = list(solutions)
    if kind == "count" and generator.random() < COUNTED:
        texts = [text for text in texts if solutions[text].answer != "0"]
    generator.shuffle(texts)
    for text in texts:
        others = [other for other in solutions if solutions[other].answer != solutions[text].answer]
        if others:
            swapped = others[int(generator.integers(len(others)))]
            return Question(kind=kind, text=text, solution=solutions[text], swapped=swapped)
    return None


def _counted(hits: Sequence[bool]) -> Solution:
    notes = [str(so_far) if hit else "no" for hit, so_far in zip(hits, accumulate(map(int, hits)), strict=True)]
    return Solution(notes=notes, answer=str(sum(hits)), slip=str(sum(hits) + 1))


def _added(values: Sequence[int | None]) -> Solution:
    """Add up the values. None marks a digit that is not asked for."""
    notes: list[str] = []
    asked: list[int] = []
    for value in values:
        if value is None:
            notes.append("no")
            continue
        notes.append(f"{sum(asked)}+{value}={sum(asked) + value}" if asked else str(value))
        asked.append(value)
    return Solution(notes=notes, answer=str(sum(asked)), slip=str(sum(asked) + 1))


def _single(sheet: Sheet) -> list[Digit]:
    values = [digit.value for digit in sheet.digits]
    return [digit for digit in sheet.digits if values.count(digit.value) == 1]
