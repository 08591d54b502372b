"""Define the rewards for what an answer says: text, numbers, choices, JSON."""

import json
import unicodedata
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Literal

from tiercel.config_base import Keys, NonNegativeFloat, Problems, shown
from tiercel.errors import DataError
from tiercel.reward_types import Sample
from tiercel.rewards.answers import LETTERS, answer_of, extract_answer, parse_choice, parse_number
from tiercel.rewards.base import Reward, RewardEntry, TruthReward
from tiercel.rewards.ground_truth import Truth, number_of

ALL_TEXT = "all of the answer, as text"
NUMBER = "the number that the answer settles on"
ARTICLES = ("a", "an", "the")
UNSEEN = "\u200b\u200e\u200f\u2060\ufeff"  # zero width, direction and byte order marks, as spreadsheets leave them


class Exact(TruthReward):
    """1 if equal to the row's text, or one of its texts, after stripping and Unicode NFC, else 0; case counts, and a
    number of the row is compared as 7 or 0.5"""

    name: Literal["exact"] = "exact"
    reads: ClassVar[str] = ALL_TEXT
    own_right_from: ClassVar[float | None] = 1.0

    def compare(self, sample: Sample, truth: Truth) -> float:
        return float(_stripped(answer_of(sample)) in _accepted(truth, _stripped))


class Normalised(TruthReward):
    """as `exact`, but case, punctuation, the articles a, an, the, and widths of spaces do not count (as in VQA)"""

    name: Literal["normalised"] = "normalised"
    reads: ClassVar[str] = ALL_TEXT
    own_right_from: ClassVar[float | None] = 1.0

    def compare(self, sample: Sample, truth: Truth) -> float:
        return float(normalised(answer_of(sample)) in _accepted(truth, normalised))


class Ocr(TruthReward):
    """1 - edit distance / length of the longer text, against the nearest of the row's texts; case counts"""

    name: Literal["ocr"] = "ocr"
    reads: ClassVar[str] = ALL_TEXT
    needs: ClassVar[str | None] = "rapidfuzz"
    own_right_from: ClassVar[float | None] = 1.0

    def compare(self, sample: Sample, truth: Truth) -> float:
        from rapidfuzz.distance import Levenshtein

        given = _stripped(answer_of(sample))
        return max(Levenshtein.normalized_similarity(given, _stripped(text)) for text in truth.texts())


class Number(TruthReward):
    """1 if within `tolerance` (0) or `relative_tolerance` x the row's number of the row's number, else 0; computed
    exactly: 0.1 is a tenth and 1/3 a third"""

    name: Literal["number"] = "number"
    reads: ClassVar[str] = NUMBER
    own_right_from: ClassVar[float | None] = 1.0
    tolerance: NonNegativeFloat | None = None
    """Largest absolute difference that still counts as right; null asks for equality."""
    relative_tolerance: NonNegativeFloat | None = None
    """Likewise, as a share of the right number; the larger of both counts."""

    def compare(self, sample: Sample, truth: Truth) -> float:
        wanted = truth.number()
        given = parse_number(answer_of(sample))
        absolute, relative = number_of(self.tolerance or 0), number_of(self.relative_tolerance or 0)
        assert absolute is not None and relative is not None
        return float(given is not None and abs(given - wanted) <= max(absolute, relative * abs(wanted)))


class Count(TruthReward):
    """1 - |n - wanted| / max(1, wanted), at least 0"""

    name: Literal["count"] = "count"
    reads: ClassVar[str] = NUMBER
    own_right_from: ClassVar[float | None] = 1.0

    def compare(self, sample: Sample, truth: Truth) -> float:
        wanted = truth.number()
        if wanted < 0 or wanted.denominator != 1:
            raise truth.malformed("is not a count; use a whole number, at least 0")
        given = parse_number(answer_of(sample))
        return 0.0 if given is None else float(max(Fraction(0), 1 - abs(given - wanted) / max(Fraction(1), wanted)))


class Choice(TruthReward):
    """1 if it is the row's choice, one of `choices` (A to Z), else 0"""

    name: Literal["choice"] = "choice"
    reads: ClassVar[str] = "the choice the answer settles on"
    own_right_from: ClassVar[float | None] = 1.0
    choices: tuple[str, ...] | None = None
    """The admissible answers; null takes the letters A to Z."""

    def problems(self, before: Sequence[RewardEntry]) -> Problems:
        if self.choices is not None and len(set(self.choices)) < max(2, len(self.choices)):
            yield Keys("choices").problem(f"is {shown(self.choices)}, but must be two or more, without repeats")

    def compare(self, sample: Sample, truth: Truth) -> float:
        choices = LETTERS if self.choices is None else self.choices
        is_text = isinstance(truth.value, str | int) and not isinstance(truth.value, bool)
        wanted = parse_choice(extract_answer(str(truth.value)), choices) if is_text else None
        if wanted is None:
            admissible = "a letter from A to Z" if self.choices is None else f"one of {', '.join(choices)}"
            raise truth.malformed(f"is not {admissible}")
        return float(parse_choice(answer_of(sample), choices) == wanted)


class Json(Reward):
    """1 if it is JSON that the schema in the file `json_schema` admits (without: any object or list), else 0"""

    name: Literal["json"] = "json"
    reads: ClassVar[str] = "all of the answer, bare or in a ```json fence"
    json_schema: str | None = None
    """File with a JSON schema that the answer must satisfy."""

    def score(self, sample: Sample) -> float:
        value = parse_json(answer_of(sample))
        if self.json_schema is None:
            return float(isinstance(value, dict | list))
        return float(value is not None and _is_valid(value, self.json_schema))


WORDING = (Exact, Normalised, Ocr, Number, Count, Choice, Json)


def _accepted(truth: Truth, form: Callable[[str], str]) -> set[str]:
    """Normalise the row's texts by `form`. Raises DataError if one becomes empty, because an empty answer would equal
    it."""
    texts = {form(text) for text in truth.texts()}
    if "" in texts:
        raise truth.malformed("has no text to compare, so an empty answer would be right; give the right answer")
    return texts


def _is_valid(value: Any, file: str) -> bool:
    from referencing.exceptions import Unresolvable

    validator = _validator(file)
    try:
        return validator.is_valid(value)
    except Unresolvable as error:
        text = f"{file} refers to another schema, which is not fetched: {error}"
        raise DataError(text, field="json_schema") from error
    except (ArithmeticError, ValueError, RecursionError):  # numbers too large for its arithmetic, or endless lists
        return False


def parse_json(text: str) -> Any:
    """Parse a text that is JSON; None if it is not, or if it is null."""
    text = text.strip()
    if text.startswith("```") and text.endswith("```") and len(text) >= 6:
        text = text[3:-3].removeprefix("json")
    try:
        return json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        return None


def _refused(word: str) -> Any:
    """Refuse NaN and Infinity, which are not JSON."""
    raise ValueError(f"{word} is not JSON")


@lru_cache(maxsize=8)
def _validator(file: str) -> Any:
    """Make a validator for the draft of JSON Schema that the file names, or for 2020-12 if it names none; it does not
    fetch other schemas."""
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        schema = json.loads(Path(file).read_text(encoding="utf-8"))
        chosen = validator_for(schema)
        chosen.check_schema(schema)
    except (OSError, ValueError, SchemaError) as error:
        raise DataError(f"{file} is not a JSON schema: {error}", field="json_schema") from error
    return chosen(schema, registry=Registry())


def normalised(text: str) -> str:
    """Normalise a text: NFKC, case folded, punctuation and symbols as spaces, without articles, single spaces. A text
    of nothing else, such as "A" or "%", keeps its articles or its signs."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    words = "".join(" " if unicodedata.category(letter)[0] in "PSZC" else letter for letter in folded).split()
    return " ".join([word for word in words if word not in ARTICLES] or words) or " ".join(folded.split())


def _stripped(text: str) -> str:
    return unicodedata.normalize("NFC", text.strip().strip(UNSEEN).strip())
