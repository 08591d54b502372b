"""Completions token by token, each with the strength of its colour by what the reader chooses."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tiercel.runs.records import CompletionRecord, GroupRecord, GroupTokens, TokenRecord, tokens_path
from tiercel.runs.step_files import read_step
from tiercel.web.report.files import parsed_records


class Scale(NamedTuple):
    """How tokens are coloured by a number of theirs, in nats."""

    title: str  # of the choice
    limits: tuple[float, float, float]  # from which on a token has a colour, and stronger ones
    direction: str = ""  # what the colours stand for; empty: the sign of the number
    name: str = ""  # of the number, if it has another one
    format: str = ".3f"


SCALES: Mapping[str, Scale] = {
    "logprob": Scale("unlikely tokens (logprob)", (0.1, 0.7, 2.3), "down"),  # below 0: 90 %, 50 % and 10 % likely
    "entropy": Scale("open choices (entropy)", (0.3, 1.0, 2.0), "up"),
    "gap": Scale("engine gap", (0.01, 0.05, 0.2), format="+.4f"),
    "teacher": Scale("teacher", (0.1, 0.5, 2.0), name="policy over teacher", format="+.2f"),
}
MOST_TOKENS = 800  # coloured ones of a completion


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """A token with its numbers in words, and the strength of each of its colours, as in "up2"."""

    text: str
    title: str
    strengths: Mapping[str, str]


def read_tokens(run: Path, step: int) -> dict[int, GroupTokens]:
    """Read a step's file of tokens/, by the index of the prompt. What cannot be read is left out."""
    with suppress(OSError):
        groups, _ = parsed_records(read_step(tokens_path(run, step)), GroupTokens.from_json)
        return {group.index: group for group in groups}
    return {}


def records_of(group: GroupRecord, tokens: GroupTokens | None) -> Sequence[TokenRecord | None]:
    """Return the tokens that the run kept of each completion; None if these are of another group."""
    if tokens is None or len(tokens.completions) != len(group.completions):
        return [None] * len(group.completions)
    return tokens.completions


def choices_of(group: GroupRecord, tokens: GroupTokens | None) -> list[str]:
    """Return by what the tokens of a group can be coloured; none if the run knows no tokens of it."""
    known = tokens.completions if tokens is not None else ()
    has = {
        "logprob": bool(known),
        "entropy": any(each.entropies is not None for each in known),
        "gap": any(each.gaps is not None for each in known),
        "teacher": any(each.teacher for each in group.completions),
    }
    found = [name for name, is_there in has.items() if is_there]
    return ["plain", *found] if found else []


def tokens_of(completion: CompletionRecord, record: TokenRecord | None) -> list[Token]:
    """Return the tokens of a completion, the first MOST_TOKENS; none if the run knows none."""
    told = [gap for _, gap in completion.teacher]
    texts = record.texts if record is not None else tuple(text for text, _ in completion.teacher)
    columns: dict[str, Sequence[float | None] | None] = {}
    if record is not None:
        columns = {"logprob": record.logprobs, "entropy": record.entropies, "gap": record.gaps}
    columns["teacher"] = told if len(told) == len(texts) else None
    known = {name: values for name, values in columns.items() if values is not None}
    rows = enumerate(texts[:MOST_TOKENS])
    return [_token(text, {name: values[at] for name, values in known.items()}) for at, text in rows]


def left_out(completion: CompletionRecord, record: TokenRecord | None) -> int:
    """Return how many of a completion's tokens are not shown."""
    return max(0, len(record.texts if record is not None else completion.teacher) - MOST_TOKENS)


def _token(text: str, numbers: Mapping[str, float | None]) -> Token:
    given = {name: value for name, value in numbers.items() if value is not None}
    said = ", ".join(f"{SCALES[name].name or name} {value:{SCALES[name].format}}" for name, value in given.items())
    title = f"{json.dumps(text, ensure_ascii=False)}: {said}" if said else ""
    strengths = {name: _strength(name, value) for name, value in given.items()}
    return Token(text=text, title=title, strengths={name: strength for name, strength in strengths.items() if strength})


def _strength(name: str, value: float) -> str:
    level = sum(abs(value) > limit for limit in SCALES[name].limits)
    return f"{SCALES[name].direction or ('up' if value > 0 else 'down')}{level}" if level else ""
