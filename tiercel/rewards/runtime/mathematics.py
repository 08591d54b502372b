"""Compute the reward `math`: equality of mathematical expressions by the library math-verify. It runs in its own
process, because parsing what a model writes needs limits of time and memory.

math-verify reads an expression between dollar signs or in a box. An expression without either is put between dollar
signs here, as a whole; in prose, only a number that it settles on is read. So a part of an expression is never taken
for the whole.
"""

import functools
import math
import re
import time
from typing import Any

from tiercel.reward_types import Sample
from tiercel.rewards.answers import answer_of, extract_answer
from tiercel.rewards.characters import plain
from tiercel.rewards.ground_truth import LIST_OR_SEVERAL, is_list_of_numbers
from tiercel.rewards.numbers import parse_number, sure_number
from tiercel.rewards.stated_answers import answer_places, boxes, without_retracted

_DELIMITED = re.compile(
    r"\$\$(?P<a>[^$]+)\$\$|\$(?P<b>[^$]+)\$|\\\((?P<c>.{1,1000}?)\\\)|\\\[(?P<d>.{1,1000}?)\\\]", re.DOTALL
)
_LONGEST = 1_000  # characters of an expression
COMPARISON_SECONDS = 5  # of towers of powers, which no time is enough for; others take milliseconds
_SPACES = re.compile(r"\s{2,}|\t")
_TAIL = re.compile(r"\A.*(?:\b(?:is|are|be|equals|get|gives)\b|[是为得:])(.*)\Z", re.DOTALL)
_ROOT = re.compile(r"√\s*(?:([0-9]+|[A-Za-z])|\(([^()]*)\)|\{([^{}]*)\})")
_NAME = re.compile(
    r"\\(?:begin|end)\s*\{[a-zA-Z]+\*?\}|\\(?:text|mathrm|operatorname|mbox|textbf|mathbf)\s*\{[^{}]*\}|\\[A-Za-z]+"
)
_WORDS = re.compile(r"\s*\$?\\(?:text|textbf|mathrm|mbox)\s*\{\s*([^{}]*[A-Za-z]{2}[^{}]*?)\s*\}\$?\s*")
_WORD = re.compile(r"[A-Za-z]{2,}|[\u3400-\u9fff]")
_MATHEMATICAL = re.compile(
    r"sin|cos|tan|cot|sec|csc|arc(?:sin|cos|tan)|log|ln|exp|sqrt|pi|and|or|inf|infinity|[A-Za-z]{2}"
)
_PROSE_OF_TWO = re.compile(r"(?i:is|it|so|no|of|to|in|if|we|be|an|as|at|by|do|he|me|my|on|up|us)")
_UNIT = re.compile(
    r"(?P<value>.*?[0-9})])\s*(?:\\(?:text|mathrm|mbox)\s*\{[^{}]*\}|(?:square |cubic )?"
    r"(?:[kcmµ]?m|km|k?g|mg|inch(?:es)?|in|feet|foot|ft|miles?|meters?|metres?|centimeters?|units?|seconds?|minutes?|hours?|degrees?|dollars?)"
    r"|°|\^\s*\{?\s*\\circ\s*\}?)(?:\s*\^\s*\{?\s*[23]\s*\}?)?\s*\Z",
    re.DOTALL,
)
_NUMERIC = re.compile(r"[^A-Za-z]*(?:\\(?:[dtc]?frac|times|cdot|text|mathrm|%|\$)[^A-Za-z]*)*(?:[eE][-+]?[0-9]+)?")
_PLAIN_ROOT = re.compile(r"(?<![\\A-Za-z])sqrt\s?\(([^()]*)\)")
_PLAIN_PI = re.compile(r"(?<![\\A-Za-z])pi(?![A-Za-z])")
_FUNCTION = re.compile(r"(?<![\\A-Za-z])(sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|log|ln|exp)(?![A-Za-z])")
_REASON = re.compile(
    r"[,;]?\s+(?:not|because|since|as|where|which|and not|rather than)\s.*|[\uff0c,]?(?:不是|因为|而不是).*", re.DOTALL
)


def score(sample: Sample) -> float | None:
    """Return 1 if the answer equals the row's expression, or one of its expressions, else 0. Raises ValueError if the
    row's expression cannot be read with certainty."""
    if sample.answer is None:
        return None
    truths = sample.answer if isinstance(sample.answer, list | tuple) else [sample.answer]
    if is_list_of_numbers(truths):
        raise ValueError(f"{truths!r} {LIST_OR_SEVERAL} (reward math)")
    wanted = [_wanted(truth) for truth in truths]
    if not wanted or not all(wanted):
        raise ValueError(
            f"{sample.answer!r} does not contain an expression that math-verify can read reliably; use one such as "
            r"5\sqrt{2}, 3/4 or x = 2, or a list of them (reward math)"
        )
    said = answer_of(sample)
    if _plain_words(said) in {found[1].casefold() for truth in map(str, truths) if (found := _WORDS.fullmatch(truth))}:
        return 1.0
    try:
        return float(any(_equals(truth, said) for truth in truths))
    except _TooLong:
        return 0.0


def _plain_words(said: str) -> str:
    """Return the words of an answer that consists of words, bare or in a box, as they are compared with a right answer
    such as `\\text{even}`."""
    boxed = boxes(said)
    return (boxed[0] if len(boxed) == 1 else said).strip(" .*$\n").casefold()


def _wanted(truth: Any) -> tuple[Any, ...]:
    """Read a right answer; empty if it is not an expression, or says more than one thing."""
    if isinstance(truth, str):
        return _parsed(extract_answer(truth), is_truth=True)
    is_number = isinstance(truth, int | float) and not isinstance(truth, bool) and math.isfinite(truth)
    return _parsed(repr(truth), is_truth=True) if is_number else ()


class _TooLong(Exception):
    """A comparison was given up, which a busy machine may be the reason for."""


@functools.lru_cache(maxsize=1024)
def _equals(truth: Any, said: str) -> bool:
    """Return whether an answer has the value of a right one; completions of a group often say the same. Raises
    _TooLong, which is not remembered."""
    from math_verify import verify

    if not (given := _parsed(said)):
        return False
    started = time.monotonic()
    are_equal = verify(list(_wanted(truth)), list(given), timeout_seconds=COMPARISON_SECONDS)
    if not are_equal and time.monotonic() - started >= COMPARISON_SECONDS:
        raise _TooLong
    return are_equal


@functools.lru_cache(maxsize=1024)
def _parsed(text: str, is_truth: bool = False) -> tuple[Any, ...]:
    """Read the expression that a text settles on."""
    text = without_retracted(_ROOT.sub(r"\\sqrt{\1\2\3}", _SPACES.sub(" ", plain(text)))).strip()
    boxed = boxes(text)
    if boxed:
        distinct = list(dict.fromkeys("".join(each.split()) for each in boxed))
        return _expression(boxed[-1] if len(distinct) == 1 else ", ".join(boxed))
    whole = _DELIMITED.fullmatch(text.removesuffix("."))
    for bare in [next(filter(None, whole.groups()))] if whole else _bare(text, is_truth):
        if found := _expression(bare):
            return found
    if not whole and _has_formula(text):
        return _delimited(text)
    number = (sure_number if is_truth else parse_number)(text)
    return () if number is None else (_rational(number),)


def _bare(text: str, is_truth: bool) -> list[str]:
    """Return what may be the expression in a text without delimiters: what follows "answer is"; or else the whole text,
    and for a completion also what follows its last "is"."""
    places = [place for place in answer_places(text) if place.is_linked]
    if places:
        said = text[places[-1].start : places[-1].end]
        return [said] if is_truth else [said, _REASON.sub("", said, count=1)]
    tail = _TAIL.search(text)
    return [text] if is_truth or tail is None or "\\" not in tail[1] else [text, tail[1]]


def _expression(text: str) -> tuple[Any, ...]:
    """Read a text that is a single expression, as a whole; empty if it is prose."""
    from math_verify import LatexExtractionConfig, parse

    text = text.lstrip("* \n").rstrip("。.* \n")
    if len(text) > _LONGEST:
        return ()
    if "%" not in text and _is_number(text) and (number := sure_number(text)) is not None:
        return (_rational(number),)
    text = _FUNCTION.sub(r"\\\1 ", _PLAIN_ROOT.sub(r"\\sqrt{\1}", _PLAIN_PI.sub(r"\\pi ", text)))
    if (measured := _UNIT.fullmatch(text)) is not None:
        text = measured["value"]
    if not text or _is_prose(text):
        return ()
    return tuple(parse(f"${text}$", [LatexExtractionConfig()], fallback_mode="no_fallback"))


def _is_number(text: str) -> bool:
    """Return whether no letter of a text can be a variable."""
    return _NUMERIC.fullmatch(text) is not None


def _is_prose(text: str) -> bool:
    """Return whether a text has words; up to two letters that stand for numbers are not a word."""
    rest = _NAME.sub(" ", text)
    words = _WORD.findall(rest)
    return any(not _MATHEMATICAL.fullmatch(word) or _PROSE_OF_TWO.fullmatch(word) for word in words)


def _has_formula(text: str) -> bool:
    """Return whether a text has LaTeX between delimiters; "$5 and $6" are sums of money."""
    return any(not _is_prose(next(filter(None, found.groups()))) for found in _DELIMITED.finditer(text))


def _delimited(text: str) -> tuple[Any, ...]:
    """Read the expressions between delimiters that a text ends with."""
    from math_verify import LatexExtractionConfig, parse

    return tuple(parse(text, [LatexExtractionConfig()], fallback_mode="no_fallback"))


def _rational(number: Any) -> Any:
    from sympy import Rational

    return Rational(number.numerator, number.denominator)
