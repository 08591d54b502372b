"""Boxes of rows and of completions, on the original image and as drawn on the page."""

from dataclasses import dataclass
from typing import Any

from tiercel.geometry import to_pixels
from tiercel.reward_types import Box, Size
from tiercel.rewards.answers import extract_answer, parse_box
from tiercel.rewards.boxes import is_proper, to_original
from tiercel.runs.records import CompletionRecord, GroupRecord, finite

_SHOWN = (336, 272)  # pixels on the page, at most
_LARGEST_ZOOM = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """A box to draw, in pixels of the original image."""

    box: Box
    style: str  # class of the style sheet
    label: str  # for readers who cannot see the picture
    tag: str = ""  # written at the box's corner
    image: int = 0  # among the prompt's images, then those that came back


def true_box(group: GroupRecord) -> Box | None:
    """Return the row's right box; None if its answer is not a box."""
    answer = group.answer
    if not group.images:
        return None
    is_written = isinstance(answer, str) and _is_scored_by_iou(group)
    box = parse_box(extract_answer(answer)) if is_written else box_of(answer)
    image = group.images[answer_image(group)]
    return to_pixels(box, group.answer_space, image.original_size) if box is not None and is_proper(box) else None


def answer_image(group: GroupRecord) -> int:
    """Return the number of the image on which the row's right box lies."""
    number = group.answer_image or 0
    return number if number < len(group.images) else 0


def box_of(value: Any) -> Box | None:
    """Read a box, or a point as a box without an area, from JSON; None if it is neither."""
    sides = [finite(side) for side in value] if isinstance(value, list | tuple) else []
    known = [side for side in sides if side is not None]
    if len(known) != len(sides) or len(known) not in (2, 4):
        return None
    return known[0], known[1], known[-2], known[-1]


def has_boxes(group: GroupRecord) -> bool:
    """Whether the completions of the prompt should hold boxes."""
    return bool(group.images) and (true_box(group) is not None or _is_scored_by_iou(group))


def _is_scored_by_iou(group: GroupRecord) -> bool:
    return any(name == "iou" or name.startswith("iou_") for name in group.completions[0].rewards)


def predicted_box(group: GroupRecord, completion: CompletionRecord) -> Box | None:
    """Read the completion's box with the parser that training uses, in pixels of the original image of the right one.
    None if there is none, or the run does not say in which coordinates it is."""
    written = parse_box(group.answer_of(completion))
    if written is None or group.coordinate_space is None:
        return None
    image = group.images[answer_image(group)]
    return to_original(written, group.coordinate_space, image.original_size, image.processed_size)


def true_outlines(group: GroupRecord) -> list[Outline]:
    """Return the row's right box, if it has one."""
    box = true_box(group)
    return [] if box is None else [Outline(box=box, style="truth", label="right", image=answer_image(group))]


def box_text(box: Box) -> str:
    """Format a box in whole pixels, for a table."""
    return ", ".join(f"{side:.0f}" if abs(side) < 1e7 else f"{side:.0e}" for side in box)


def shown_size(original: Size) -> Size:
    """Return the size of a picture on the page, in pixels."""
    zoom = min(_SHOWN[0] / original[0], _SHOWN[1] / original[1], _LARGEST_ZOOM)
    return max(8, round(original[0] * zoom)), max(8, round(original[1] * zoom))


def placed(box: Box, original: Size, shown: Size) -> Box:
    """Place a box on a picture that is shown in another size. Corners are sorted and kept close to the picture, because
    a completion may write any number."""
    (x1, x2), (y1, y2) = (
        sorted(min(max(side / original[axis], -1.0), 2.0) * shown[axis] for side in box[axis::2]) for axis in (0, 1)
    )
    return x1, y1, x2, y2
