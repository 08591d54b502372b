"""Texts of cards: what a reader sees of prompts, answers and completions."""

import json
from typing import Any

from tiercel.reward_types import ToolCall
from tiercel.rewards.answers import parse_box
from tiercel.rewards.boxes import iou, is_proper
from tiercel.runs.records import CompletionRecord, GroupRecord
from tiercel.web.report.boxes import box_text, predicted_box, true_box
from tiercel.web.report.numbers import NOTHING, short

LONGEST_TEXT = 1500  # characters of one text on the page
_KEPT_TAIL = 400
_LONGEST_CALL = 300


def clipped(text: str, longest: int = LONGEST_TEXT) -> str:
    """Shorten a long text in its middle, and say how many characters were left out."""
    if len(text) <= longest:
        return text
    tail = min(_KEPT_TAIL, longest // 3)
    left_out = len(text) - longest
    return f"{text[: longest - tail]}\n[… {left_out:,} characters left out here …]\n{text[-tail:]}"


def in_sight(text: str) -> str:
    """Write text of white space alone with escapes, so that it can be seen."""
    return json.dumps(text) if text.isspace() else text


def value_text(value: float | None) -> str:
    """Format a reward or an advantage; None is a dash."""
    return NOTHING if value is None else short(value)


def mean_text(values: list[float]) -> str:
    """Format the mean of rewards; of none it is a dash."""
    return value_text(sum(values) / len(values) if values else None)


def answer_text(answer: Any) -> str:
    """Format the right answer as the row has it."""
    if answer is None:
        return "(the row has none under `answer`)"
    return clipped(answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False), 600)


def call_text(call: ToolCall) -> str:
    """Write a tool call as Python would."""
    arguments = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.arguments.items())
    return clipped(f"{call.name}({arguments})" if call.name else "a call that cannot be read", _LONGEST_CALL)


def overlap(group: GroupRecord, completion: CompletionRecord) -> float | None:
    """Return the IoU of the completion's box with the row's, both in pixels of the original image; None if one of
    them is missing."""
    truth, given = true_box(group), predicted_box(group, completion) if group.images else None
    return None if truth is None or given is None else iou(given, truth)


def box_cell(group: GroupRecord, completion: CompletionRecord) -> str:
    """Format the completion's box for a table, in pixels of the original image, or say why there is none."""
    box = predicted_box(group, completion)
    if box is None:
        return "no box" if parse_box(group.answer_of(completion)) is None else "coordinates unknown"
    return box_text(box) + ("" if is_proper(box) else " (inverted)")


def failure_reasons(completion: CompletionRecord) -> dict[str, list[str]]:
    """Return what failed rewards said, each reason once, and the rewards that said it."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in completion.failures.items():
        names_by_reason.setdefault(reason, []).append(name)
    return names_by_reason


def totals_of(group: GroupRecord) -> list[float]:
    """Return the rewards of the completions that have one."""
    return [completion.total for completion in group.completions if completion.total is not None]


def judged_of(group: GroupRecord) -> list[bool]:
    """Return the verdicts of the completions that have one."""
    return [completion.is_correct for completion in group.completions if completion.is_correct is not None]
