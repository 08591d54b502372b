"""Completions of several turns: what the policy wrote, its tool calls, and what came back."""

import json
from collections.abc import Sequence

from tiercel.rewards.boxes import to_original
from tiercel.runs.records import CompletionRecord, GroupRecord, finite
from tiercel.samples import ToolCall
from tiercel.web.report.cards import clipped, text_block
from tiercel.web.report.markup import Html, element, fragment
from tiercel.web.report.pictures import Album, Outline, box_of, on, picture, predicted_outlines

ASKED = ("asked", "thin: asked of a tool")  # in legends
TOLD = (("up", "likelier to the policy than to the teacher"), ("down", "likelier to the teacher"))
GAPS = (0.1, 0.5, 2.0)  # nats, from which on a token has a colour, a stronger and the strongest one
MOST_TOKENS = 800  # coloured ones of a completion
_MOST_TURNS = 12  # of a completion
_LONGEST_CALL = 300  # characters
_POINT_SHARE = 0.03  # radius around a point, of the longer side


def completion_block(album: Album, group: GroupRecord, completion: CompletionRecord, style: str) -> Html:
    """Show what the policy wrote, turn by turn where something answered. `style`: of outlines, a class."""
    if not completion.turns:
        return _told_tokens(completion) if completion.teacher else text_block(completion.text)
    outlines = asked_outlines(group, completion, style, "asked")
    last = len(completion.turns)
    items: list[Html] = []
    shown = len(group.images)
    for number, turn in enumerate(completion.turns, start=1):
        images = list(enumerate(turn.images, start=shown))
        shown += len(images)
        if _MOST_TURNS <= number < last:
            continue
        figures = [picture(album, image, on(outlines, index), index + 1) for index, image in images]
        note = "Came back:" if number < last else "Came back; the trajectory ended before the policy read it:"
        answer = None if turn.answer is None else _answer(turn.answer, figures, note)
        items.append(element("li", text_block(turn.text), [_call(call) for call in turn.calls], answer, value=number))
    if last > _MOST_TURNS:
        note = f"Turns {_MOST_TURNS} to {last - 1:,} are left out."
        items.insert(-1, element("li", element("p", note, class_="aside"), class_="gap"))
    return element("ol", items, class_="turns")


def _told_tokens(completion: CompletionRecord) -> Html:
    """Colour each token by how much likelier the policy finds it than a teacher does, or the other way round."""
    marks = [_told(text, gap) for text, gap in completion.teacher[:MOST_TOKENS] if text]
    return element("pre", marks, left_out_note(len(completion.teacher)), class_="said")


def left_out_note(count: int) -> str:
    """Say how many of a completion's tokens are not shown; an empty text where all are."""
    return f"\n[… {count - MOST_TOKENS:,} tokens left out here …]" if count > MOST_TOKENS else ""


def _told(text: str, gap: float | None) -> Html:
    if gap is None or not (level := level_of(gap, GAPS)):
        return fragment(text)
    return element("mark", text, class_=f"{'up' if gap > 0 else 'down'} l{level}", title=f"{gap:+.2f}")


def level_of(value: float, limits: Sequence[float]) -> int:
    """Return how many limits the size of a number is above: the strength of its colour."""
    return sum(abs(value) > limit for limit in limits)


def _call(call: ToolCall) -> Html:
    arguments = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.arguments.items())
    text = f"{call.name}({arguments})" if call.name else "a call that cannot be read"
    said = element("code", clipped(text, _LONGEST_CALL))
    if call.failure is None:
        return element("p", said, class_="call")
    failed = element("span", f" failed: {clipped(call.failure, _LONGEST_CALL)}", class_="bad")
    return element("p", said, failed, class_="call")


def _answer(answer: str, figures: list[Html], note: str) -> Html:
    """Show what came back, each picture at its mark. A mark has no picture where the trajectory ended there."""
    before, *after = answer.split("<image>")
    parts = [_text(before)]
    for number, text in enumerate(after):
        missing = element("p", "a picture that is not kept", class_="no-picture")
        parts += [figures[number] if number < len(figures) else missing, _text(text)]
    return element("div", element("small", note), parts if any(parts) else text_block(""), class_="came-back")


def _text(text: str) -> Html | None:
    return text_block(text.strip("\n")) if text.strip() else None


def drawn_outlines(
    group: GroupRecord, completion: CompletionRecord, style: str, label: str, tag: str = ""
) -> list[Outline]:
    """Return the box that the completion ends in, and those that its tool calls name."""
    boxes = predicted_outlines(group, completion, style, label, tag)
    return boxes + asked_outlines(group, completion, style, label, tag)


def asked_outlines(
    group: GroupRecord, completion: CompletionRecord, style: str, label: str, tag: str = ""
) -> list[Outline]:
    """Return the boxes and points that tool calls name, each in pixels of the picture that it is asked of."""
    if group.coordinate_space is None:
        return []
    outlines = []
    images = list(group.images)
    for turn in completion.turns:
        images += turn.images
        for call in turn.calls:
            written = box_of(call.arguments.get("box", call.arguments.get("point")))
            number = finite(call.arguments.get("image", 1))
            if written is None or number is None or number not in range(1, len(images) + 1):
                continue
            index = int(number) - 1
            image = images[index]
            box = to_original(written, group.coordinate_space, image.original_size, image.processed_size)
            if box[:2] == box[2:]:
                radius = _POINT_SHARE * max(image.original_size)
                box = (box[0] - radius, box[1] - radius, box[2] + radius, box[3] + radius)
            named = f"{label}, {call.name}"
            outlines.append(Outline(box=box, style=f"{style} asked", label=named, tag=tag, image=index))
    return outlines


def is_asked(group: GroupRecord) -> bool:
    """Whether a tool call of the group names a box or a point that can be drawn."""
    return any(asked_outlines(group, completion, "", "") for completion in group.completions)
