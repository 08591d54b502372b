"""Completions with their tokens marked, so that the style sheet colours them by what the reader chooses."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tiercel.regular_files import read_text
from tiercel.runs.records import GroupRecord, GroupTokens, TokenRecord, tokens_path
from tiercel.web.report.markup import Html, element
from tiercel.web.report.reading import parsed_lines
from tiercel.web.report.turns import GAPS, MOST_TOKENS, left_out_note, level_of

CHOICES: Mapping[str, str] = {
    "plain": "no colours",
    "logprob": "unlikely tokens (logprob)",
    "entropy": "open choices (entropy)",
    "gap": "engine gap",
    "teacher": "teacher",
}
_LOGPROBS = (0.1, 0.7, 2.3)  # nats below 0, from which on a token has a colour: 90 %, 50 % and 10 % likely
_ENTROPIES = (0.3, 1.0, 2.0)  # nats
_ENGINE_GAPS = (0.01, 0.05, 0.2)  # nats
Column = Sequence[float | None] | None


def read_tokens(run: Path, step: int) -> dict[int, GroupTokens]:
    """Read a step's file of tokens/, by the index of the prompt. What cannot be read is left out."""
    try:
        text = read_text(tokens_path(run, step))
    except OSError:
        return {}
    found = {}
    for value in parsed_lines(text):
        try:
            group = GroupTokens.from_json(value)
        except ValueError:
            continue
        found[group.index] = group
    return found


def marked_tokens(group: GroupRecord, tokens: GroupTokens | None) -> dict[int, Html]:
    """Return the marked text of each completion that the run knows tokens of, by its place."""
    known = tokens.completions if tokens is not None and len(tokens.completions) == len(group.completions) else ()
    marked = {}
    for place, completion in enumerate(group.completions):
        told = [gap for _, gap in completion.teacher]
        if known:
            record = known[place]
            marked[place] = _block(record, told if len(told) == len(record.texts) else None)
        elif told:
            texts = tuple(text for text, _ in completion.teacher)
            bare = TokenRecord(texts=texts, logprobs=(None,) * len(texts), entropies=None, gaps=None)
            marked[place] = _block(bare, told)
    return marked


def choices_of(group: GroupRecord, tokens: GroupTokens | None) -> list[str]:
    """Return by what the tokens of a group can be coloured; none where the run knows no tokens of it."""
    known = tokens.completions if tokens is not None else ()
    has = {
        "logprob": bool(known),
        "entropy": any(each.entropies is not None for each in known),
        "gap": any(each.gaps is not None for each in known),
        "teacher": any(each.teacher for each in group.completions),
    }
    found = [name for name, is_there in has.items() if is_there]
    return ["plain", *found] if found else []


def _block(record: TokenRecord, teacher: Column) -> Html:
    columns = (record.logprobs, record.entropies, record.gaps, teacher)
    rows = zip(record.texts, *(column or (None,) * len(record.texts) for column in columns), strict=True)
    marks = [_mark(*row) for row in list(rows)[:MOST_TOKENS]]
    return element("pre", marks, left_out_note(len(record.texts)), class_="said marked")


def _mark(text: str, logprob: float | None, entropy: float | None, gap: float | None, teacher: float | None) -> Html:
    said = [
        f"{name} {value:{form}}"
        for name, value, form in (
            ("logprob", logprob, ".3f"),
            ("entropy", entropy, ".3f"),
            ("gap", gap, "+.4f"),
            ("policy over teacher", teacher, "+.2f"),
        )
        if value is not None
    ]
    return element(
        "mark",
        text,
        class_="token",
        title=f"{json.dumps(text, ensure_ascii=False)}: {', '.join(said)}" if said else None,
        data_logprob=_strength(logprob, _LOGPROBS, ("down", "down")),
        data_entropy=_strength(entropy, _ENTROPIES, ("up", "up")),
        data_gap=_strength(gap, _ENGINE_GAPS, ("up", "down")),
        data_teacher=_strength(teacher, GAPS, ("up", "down")),
    )


def _strength(value: float | None, limits: Sequence[float], signs: tuple[str, str]) -> str | None:
    level = 0 if value is None else level_of(value, limits)
    return f"{signs[0] if (value or 0) > 0 else signs[1]}{level}" if level else None
