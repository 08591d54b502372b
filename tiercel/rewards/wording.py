"""Rewards for what an answer says: text, numbers, choices, JSON."""

import json
import unicodedata
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

from tiercel.config.schema import Reward
from tiercel.errors import DataError
from tiercel.rewards.answers import LETTERS, extract_answer, parse_choice, parse_number
from tiercel.rewards.truths import malformed, number_of, required_number, texts_of, truth_of
from tiercel.samples import Sample

ARTICLES = ("a", "an", "the")


def exact_reward(sample: Sample, reward: Reward) -> float | None:
    """1 where the answer is the row's text, or one of its texts, else 0. Both stripped and in Unicode NFC; case and
    spelling count. A number is compared as Python writes it (7, 0.5)."""
    truth = truth_of(sample, reward)
    if truth is None:
        return None
    wanted = {_stripped(text) for text in texts_of(sample, reward, truth)}
    return float(_stripped(extract_answer(sample.completion)) in wanted)


def normalised_reward(sample: Sample, reward: Reward) -> float | None:
    """As `exact`, but case, punctuation, the articles a, an, the, and widths of spaces do not count (as in VQA)."""
    truth = truth_of(sample, reward)
    if truth is None:
        return None
    wanted = {normalised(text) for text in texts_of(sample, reward, truth)}
    return float(normalised(extract_answer(sample.completion)) in wanted)


def ocr_reward(sample: Sample, reward: Reward) -> float | None:
    """1 - edit distance / length of the longer text, of the answer and the row's text (the nearest of several): 1 where
    they are equal. Both stripped and in Unicode NFC; case counts."""
    from rapidfuzz.distance import Levenshtein

    truth = truth_of(sample, reward)
    if truth is None:
        return None
    given = _stripped(extract_answer(sample.completion))
    return max(Levenshtein.normalized_similarity(given, _stripped(text)) for text in texts_of(sample, reward, truth))


def number_reward(sample: Sample, reward: Reward) -> float | None:
    """1 where the last number of the answer is within `tolerance`, or `relative_tolerance` times the row's, of the
    row's number, else 0. Exact: 0.1 is a tenth and 1/3 a third."""
    truth = truth_of(sample, reward)
    if truth is None:
        return None
    wanted = required_number(sample, reward, truth)
    given = parse_number(extract_answer(sample.completion))
    absolute, relative = number_of(reward.tolerance or 0), number_of(reward.relative_tolerance or 0)
    assert absolute is not None and relative is not None
    return float(given is not None and abs(given - wanted) <= max(absolute, relative * abs(wanted)))


def count_reward(sample: Sample, reward: Reward) -> float | None:
    """1 - |n - wanted| / max(1, wanted), at least 0, of the last number of the answer: near counts earn something."""
    truth = truth_of(sample, reward)
    if truth is None:
        return None
    wanted = required_number(sample, reward, truth)
    if wanted < 0 or wanted.denominator != 1:
        raise malformed(sample, reward, truth, "is no count; write a whole number from 0 on")
    given = parse_number(extract_answer(sample.completion))
    return 0.0 if given is None else float(max(Fraction(0), 1 - abs(given - wanted) / max(Fraction(1), wanted)))


def choice_reward(sample: Sample, reward: Reward) -> float | None:
    """1 where the answer settles on the row's choice, else 0; the right answer is one of `choices` (default A to Z)."""
    truth = truth_of(sample, reward)
    if truth is None:
        return None
    choices = LETTERS if reward.choices is None else reward.choices
    is_text = isinstance(truth, str | int) and not isinstance(truth, bool)
    wanted = parse_choice(extract_answer(str(truth)), choices) if is_text else None
    if wanted is None:
        shown = "a letter from A to Z" if reward.choices is None else f"one of {', '.join(choices)}"
        raise malformed(sample, reward, truth, f"is not {shown}")
    return float(parse_choice(extract_answer(sample.completion), choices) == wanted)


def json_reward(sample: Sample, reward: Reward) -> float:
    """1 where the answer is JSON, in a ```json fence or bare, that the schema in the file `json_schema` admits, else 0.
    Without a schema any JSON object or list is enough."""
    value = parse_json(extract_answer(sample.completion))
    if reward.json_schema is None:
        return float(isinstance(value, dict | list))
    return float(value is not None and _is_valid(value, reward.json_schema))


def _is_valid(value: Any, file: str) -> bool:
    from referencing.exceptions import Unresolvable

    validator = _validator(file)
    try:
        return validator.is_valid(value)
    except Unresolvable as error:
        text = f"{file} refers to another schema, which is not fetched: {error}"
        raise DataError(text, field="json_schema") from error
    except (ArithmeticError, ValueError, RecursionError):  # numbers too large for its arithmetic, lists without end
        return False


def parse_json(text: str) -> Any:
    """The value of a text that is JSON; None where it is not, or is null."""
    text = text.strip()
    if text.startswith("```") and text.endswith("```") and len(text) >= 6:
        text = text[3:-3].removeprefix("json")
    try:
        return json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        return None


def _refused(word: str) -> Any:
    """NaN and Infinity, which are no JSON."""
    raise ValueError(f"{word} is no JSON")


@lru_cache(maxsize=8)
def _validator(file: str) -> Any:
    """Of JSON Schema's draft that the file names, 2020-12 where it names none; it fetches no other schema."""
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for
    from referencing import Registry

    try:
        schema = json.loads(Path(file).read_text(encoding="utf-8"))
        chosen = validator_for(schema)
        chosen.check_schema(schema)
    except (OSError, ValueError, SchemaError) as error:
        raise DataError(f"{file} is no JSON schema: {error}", field="json_schema") from error
    return chosen(schema, registry=Registry())


def normalised(text: str) -> str:
    """NFKC, case folded, punctuation and symbols as spaces, without articles, single spaces."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    spaced = "".join(" " if unicodedata.category(letter)[0] in "PSZC" else letter for letter in folded)
    return " ".join(word for word in spaced.split() if word not in ARTICLES)


def _stripped(text: str) -> str:
    return unicodedata.normalize("NFC", text.strip())
