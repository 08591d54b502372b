"""Completions of several turns: what came back piece by piece, and the boxes that tool calls name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tiercel.rewards.boxes import to_original
from tiercel.runs.records import CompletionRecord, GroupRecord, ImageRecord, TurnRecord, finite
from tiercel.web.report.boxes import Outline, answer_image, box_of, has_boxes, predicted_box

MOST_TURNS = 12  # of a completion
_POINT_SHARE = 0.03  # radius around a point, of the longer side
Piece = tuple[int, ImageRecord] | str | None  # a picture and its place among all, a text, a picture that is not kept


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownTurn:
    """A turn, counted from 1, and what came back; `pieces` is None if nothing did."""

    number: int
    turn: TurnRecord
    pieces: tuple[Piece, ...] | None


def shown_turns(group: GroupRecord, completion: CompletionRecord, among: range | None = None) -> Iterator[ShownTurn]:
    """Yield the turns that the page shows: the first ones and the last. `among`: turns counted from 0; None: all."""
    last, shown = len(completion.turns), len(group.images)
    for number, turn in enumerate(completion.turns, start=1):
        images = list(enumerate(turn.images, start=shown))
        shown += len(images)
        if MOST_TURNS <= number < last or (among is not None and number - 1 not in among):
            continue
        pieces = None if turn.answer is None else tuple(_pieces(turn.answer, images)) or ("",)
        yield ShownTurn(number=number, turn=turn, pieces=pieces)


def _pieces(answer: str, images: Sequence[tuple[int, ImageRecord]]) -> Iterator[Piece]:
    """Yield the texts between the marks of pictures, and the pictures. A mark has none if the trajectory ended
    there."""
    for number, text in enumerate(answer.split("<image>")):
        if number:
            yield images[number - 1] if number <= len(images) else None
        if text.strip():
            yield text.strip("\n")


def drawn_outlines(
    group: GroupRecord, completion: CompletionRecord, style: str, label: str, tag: str = ""
) -> list[Outline]:
    """Return the box that the completion ends in, and those that its tool calls name."""
    box = predicted_box(group, completion) if has_boxes(group) else None
    ended = [] if box is None else [Outline(box=box, style=style, label=label, tag=tag, image=answer_image(group))]
    return ended + asked_outlines(group, completion, style, label, tag)


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
