"""Parts of the page that held-out rows and rollouts share: prompts, answers, completions, rewards."""

import json
from typing import Any

from tiercel.rewards.boxes import iou, is_proper
from tiercel.runs.records import CompletionRecord, GroupRecord
from tiercel.web.report.markup import Html, aside, element
from tiercel.web.report.numbers import NOTHING, short
from tiercel.web.report.pictures import box_text, has_boxes, predicted_box, true_box

LONGEST_TEXT = 1500  # characters of one text on the page
_KEPT_TAIL = 400


def clipped(text: str, longest: int = LONGEST_TEXT) -> str:
    """Shorten a long text in its middle, and say how many characters were left out."""
    if len(text) <= longest:
        return text
    tail = min(_KEPT_TAIL, longest // 3)
    left_out = len(text) - longest
    return f"{text[: longest - tail]}\n[… {left_out:,} characters left out here …]\n{text[-tail:]}"


def text_block(text: str, style: str = "said", longest: int = LONGEST_TEXT) -> Html:
    """Show text as written: "(empty)" for none, and escapes for text of white space alone."""
    if not text:
        return element("p", "(empty)", class_="aside")
    if text.isspace():
        text = json.dumps(text)
    return element("pre", clipped(text, longest), class_=style, dir="auto")


def value_text(value: float | None) -> str:
    """Format a reward or an advantage; None is a dash."""
    return NOTHING if value is None else short(value)


def number_cell(column: str, text: str) -> Html:
    """Make a cell of a table of completions, which bears its column's name where the screen is narrow."""
    return element("td", text, class_="number", data_label=column)


def answer_text(answer: Any) -> str:
    """Format the right answer as the row has it."""
    if answer is None:
        return "(the row has none under `answer`)"
    return clipped(answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False), 600)


def prompt_block(group: GroupRecord) -> Html:
    """Show the row's id, question and right answer, and the prompt as rendered for the model."""
    rendered = answer = note = None
    if group.prompt and group.prompt != group.question:
        rendered = element("details", element("summary", "Prompt as the model gets it"), text_block(group.prompt))
    if group.answer is not None or len(group.completions) < 2:
        code = element("code", answer_text(group.answer))
        answer = element("p", element("b", "Right answer "), code, class_="answer")
    if has_boxes(group) and group.coordinate_space is None:
        note = aside("The run does not say in which coordinates the model writes boxes, so its boxes cannot be drawn.")
    return element("div", element("h4", group.id), text_block(group.question, "question"), answer, rendered, note)


def overlap(group: GroupRecord, completion: CompletionRecord) -> float | None:
    """Return the IoU of the completion's box with the row's, both in pixels of the original image; None where one of
    them is missing."""
    truth, given = true_box(group), predicted_box(group, completion).box if group.images else None
    return None if truth is None or given is None else iou(given, truth)


def box_cell(group: GroupRecord, completion: CompletionRecord) -> str:
    """Format the completion's box for a table, in pixels of the original image, or say why there is none."""
    found = predicted_box(group, completion)
    if found.box is None:
        return found.missing
    return box_text(found.box) + ("" if is_proper(found.box) else " (inverted)")


def failures_block(completion: CompletionRecord) -> Html | None:
    """Show what each failed reward said, in a <details>: open with turns, whose environment may have failed for all."""
    if not completion.failures:
        return None
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in completion.failures.items():
        names_by_reason.setdefault(reason, []).append(name)
    said = [[element("b", ", ".join(names)), text_block(reason)] for reason, names in names_by_reason.items()]
    summary = element("summary", f"{', '.join(completion.failures)}: failed", class_="bad")
    return element("details", summary, said, class_="failures", open=bool(completion.turns))
