"""The reward `math`: equality of mathematical expressions by the library math-verify. It runs in a process of
its own, because a parser of what a model writes needs limits of time and memory."""

import functools
from typing import Any

from tiercel.rewards.answers import extract_answer
from tiercel.samples import Sample


def score(sample: Sample) -> float | None:
    """Return 1 where the answer equals the row's expression, LaTeX or plain, else 0. Raises ValueError where the
    row's cannot be read."""
    if sample.answer is None:
        return None
    wanted = _parsed(extract_answer(str(sample.answer)))
    if not wanted:
        raise ValueError(f"{sample.answer!r} holds no expression that math-verify can read (reward math)")
    given = _parsed(extract_answer(sample.completion))
    return float(bool(given) and _verify(list(wanted), list(given)))


def _verify(wanted: list[Any], given: list[Any]) -> bool:
    from math_verify import verify

    return verify(wanted, given)


@functools.lru_cache(maxsize=1024)
def _parsed(text: str) -> tuple[Any, ...]:
    """Read the expressions that the text ends in; bare LaTeX is read too."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    found = parse(text, [LatexExtractionConfig(), ExprExtractionConfig()])
    return tuple(found or parse(f"${text}$", [LatexExtractionConfig()]))
