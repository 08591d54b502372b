"""Check rows of every format strictly and make `Row`s of them.

A format's converter (formats/converters.py) reads a record into a `RowDraft`; `finish` checks the draft and makes the
Row. All functions here raise DataError with the wrong field; `rows_of` of formats/registry.py makes a RejectedRow
of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tiercel.data.marks import BOX_MARK, IMAGE_MARK, VIDEO_MARK, count_marks, fill_prompt, fill_references, place_marks
from tiercel.data.media.images import ImageProblem, stray_problem
from tiercel.data.record_values import brief_value, whole
from tiercel.data.texts import told
from tiercel.data.turns import Purpose, answer_start, only_last_turn, require_turns
from tiercel.errors import DataError
from tiercel.geometry import misfit, to_pixels
from tiercel.message_text import counted
from tiercel.reward_types import Box, BoxSpace, Point, Size
from tiercel.types import ImageRoots, ImageSource, Message, PixelLimits, RejectedRow, Row, VideoSource

ImageSize = Callable[[ImageSource], Size]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowDraft:
    """Holds a record of any format, read but not yet checked as a whole."""

    messages: tuple[Message, ...]
    images: tuple[ImageSource, ...]
    videos: tuple[VideoSource, ...] = ()
    answer: Any
    columns: Mapping[str, Any]
    references: tuple[str, ...] = ()  # texts that replace the <ref-object> marks
    boxes: tuple[Box | Point, ...] = ()  # boxes and points that replace the <bbox> marks
    box_images: tuple[int, ...] = ()  # for each box, the number of its image
    box_space: BoxSpace | None = None  # what the boxes are in; None for the recipe's data.boxes
    answer_space: BoxSpace | None = None  # what boxes in the answer are in; likewise
    answer_image: int | None = None  # number of the image that boxes of the answer lie on, if the row says so
    boxes_are_sides: bool = False  # they were given as [x, y, width, height]
    named: Mapping[str, Any] = field(default_factory=dict)  # what the format's framework passes to rewards by name
    messages_field: str = "messages"  # key of the messages in this format
    boxes_field: str = "boxes"


def reject(row: Row, error: DataError) -> RejectedRow:
    """Make a RejectedRow of a row whose images or prompt cannot be used."""
    reason = str(error).removeprefix(f"row {row.id}, column {error.field}: ")  # the record has these itself
    return RejectedRow(id=row.id, file=row.file, line=row.line, field=error.field, reason=reason)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Describes how the rows of a file are read."""

    file: str
    purpose: Purpose
    image_roots: ImageRoots
    image_size: ImageSize  # returns (width, height) of an image, or raises DataError
    prompt: str | None = None  # data.prompt
    box_space: BoxSpace = "pixels"  # data.boxes
    ids: Literal["own", "line"] = "own"  # data.ids
    last_turn_only: bool = False  # data.train_turns
    stem: str | None = None  # what ids of rows that have none begin with; None for the file's own


def finish(draft: RowDraft, reading: Reading, *, id: str, line: int, pixels: PixelLimits | None = None) -> Row:
    """Check a draft as a whole and make the Row. `reading.image_size` is called only if boxes depend on it."""
    field = draft.messages_field
    messages = draft.messages
    if reading.last_turn_only:
        messages = only_last_turn(messages)
    require_turns(messages, reading.purpose, field)
    if reading.prompt is not None:
        messages = fill_prompt(messages, reading.prompt, draft.columns)
    messages = fill_references(messages, draft.references)
    require_under_roots(draft, reading.image_roots)
    messages = place_marks(messages, VIDEO_MARK, len(draft.videos), field, draft.columns)
    messages = place_marks(messages, IMAGE_MARK, len(draft.images), field, draft.columns)
    if pixels is not None and draft.videos and not draft.images:
        key = "min_pixels" if pixels.most is None else "max_pixels"
        raise DataError(f"limits images, but the row has only videos; set data.video.{key}", field=key)
    if draft.videos and draft.boxes:
        raise DataError("a row with videos cannot have boxes", field=draft.boxes_field)
    for number, message in enumerate(messages):
        if message.role != "system" and not message.content.strip():
            raise DataError(f"the {message.role} turn is empty", field=f"{field}[{number}]")
    return Row(
        id=id,
        messages=messages,
        images=draft.images,
        videos=draft.videos,
        answer=draft.answer,
        boxes=_checked_boxes(draft, messages, reading),
        box_images=draft.box_images,
        answer_image=_answer_image(draft, messages),
        answer_space=draft.answer_space or reading.box_space,
        pixels=pixels,
        columns=draft.columns,
        named=draft.named,
        file=reading.file,
        line=line,
        image_roots=reading.image_roots,
    )


def require_under_roots(draft: RowDraft, roots: ImageRoots) -> None:
    """Raise DataError if an absolute path leads out of the roots, so that such rows are rejected while they are
    read."""
    files = [(f"images[{number}]", image) for number, image in enumerate(draft.images)]
    for number, video in enumerate(draft.videos):
        files += [(f"videos[{number}]", file) for file in video.frames or [ImageSource(path=video.path)]]
    for place, file in files:
        if file.data is None and file.path is not None and (problem := stray_problem(file.path, roots)):
            raise ImageProblem(file.path, problem, place)


def read_pixels(record: Mapping[str, Any]) -> PixelLimits | None:
    """Read the row's own `min_pixels` and `max_pixels`."""
    least, most = whole(record.get("min_pixels")), whole(record.get("max_pixels"))
    for key, value in (("min_pixels", least), ("max_pixels", most)):
        if value is not None and (type(value) is not int or value < 1):
            raise DataError(f"is {brief_value(value)}, but must be a positive integer", field=key)
    if least is not None and most is not None and least > most:
        raise DataError(f"is {least}, but must be at most the row's max_pixels, {most}", field="min_pixels")
    return None if least is None and most is None else PixelLimits(least=least, most=most)


def _answer_image(draft: RowDraft, messages: Sequence[Message]) -> int | None:
    """Return the number of the image that boxes of the right answer lie on: the one that the row gives; or else the one
    that the boxes after the last question lie on, or all its boxes if there are none, and None if these lie on several
    images; or else the first."""
    if draft.answer_image is not None:
        if not 0 <= draft.answer_image < len(draft.images):
            there = counted(len(draft.images), "image")
            raise DataError(told("answer on no image", brief_value(draft.answer_image), there), field="answer_image")
        return draft.answer_image
    asked = count_marks(messages[: answer_start(messages)], BOX_MARK)
    named = set(draft.box_images[asked:] or draft.box_images) or {0}
    return named.pop() if len(named) == 1 else None


def _checked_boxes(draft: RowDraft, messages: Sequence[Message], reading: Reading) -> tuple[Box | Point, ...]:
    """Check the draft's boxes and convert them to pixels of their images. Boxes in pixels are compared with their
    images only if those are opened anyway."""
    field, space = draft.boxes_field, draft.box_space or reading.box_space
    marks = count_marks(messages, BOX_MARK)
    if marks != len(draft.boxes):
        raise DataError(told("number of boxes", len(draft.boxes), BOX_MARK, marks), field=field)
    for number, image in enumerate(draft.box_images):
        if not 0 <= image < len(draft.images):
            there = counted(len(draft.images), "image")
            raise DataError(told("box on no image", image, there), field=f"{field}[{number}]")
    if space == "pixels" and not draft.boxes_are_sides:
        return draft.boxes
    sizes = {image: reading.image_size(draft.images[image]) for image in set(draft.box_images)}
    converted: list[Box | Point] = []
    for number, (box, image) in enumerate(zip(draft.boxes, draft.box_images, strict=True)):
        pixels = to_pixels(box, space, sizes[image])
        if problem := misfit(pixels, space, sizes[image]):
            shown = "[" + ", ".join(f"{side:g}" for side in box) + "]"
            if draft.boxes_are_sides and len(box) == 4:
                x1, y1, x2, y2 = box
                shown = f"[{x1:g}, {y1:g}, {x2 - x1:g}, {y2 - y1:g}] as [x, y, width, height]"
                width, height = sizes[image]
                named = given_size(draft.columns)
                problem = f"is not inside its image of {width} x {height} pixels; is it [x1, y1, x2, y2]?"
                if named not in (None, (width, height)):
                    problem = told("box of another size", width, height, named[0], named[1])
            raise DataError(f"{shown} {problem}", field=field if draft.boxes_are_sides else f"{field}[{number}]")
        converted.append(pixels)
    return tuple(converted)


def given_size(columns: Mapping[str, Any]) -> Size | None:
    """Return the width and height that a row gives for its picture, in pixels; None if it does not give both."""
    for before in ("", "image_", "img_"):
        sides = [columns.get(f"{before}{side}") for side in ("width", "height")]
        whole = [int(side) for side in sides if isinstance(side, int | float) and float(side).is_integer()]
        if len(whole) == 2:
            return whole[0], whole[1]
    return None
