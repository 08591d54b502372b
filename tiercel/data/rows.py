"""Check rows of every format strictly and make `Row`s of them.

A format's converter (formats/converters.py) reads a record into a `RowDraft`; `finish` checks the draft and makes the
Row. All functions here raise DataError with the wrong field; `rows_of` of formats/registry.py makes a RejectedRow
of it.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from string import Formatter
from typing import Any, Literal

from tiercel.data.media.file_names import MediaKind, column_of_files
from tiercel.data.media.images import ImageProblem, stray_problem
from tiercel.data.texts import told
from tiercel.errors import DataError
from tiercel.geometry import misfit, to_pixels
from tiercel.message_text import brief, counted
from tiercel.reward_types import Box, BoxSpace, Point, Size, column
from tiercel.types import ImageRoots, ImageSource, Message, PixelLimits, RejectedRow, Row, VideoSource

Purpose = Literal["sft", "pairs", "labels", "grpo"]
Role = Literal["system", "user", "assistant"]
ImageSize = Callable[[ImageSource], Size]

IMAGE_MARK = "<image>"
VIDEO_MARK = "<video>"
BOX_MARK = "<bbox>"
REFERENCE_MARK = "<ref-object>"

# Marks of a picture or a video as other frameworks write them, such as <image 1> of MMMU. The second table also has
# those that texts about XML may have.
_NUMBERED_MARKS = {
    IMAGE_MARK: re.compile(r"<[Ii](?:mage|MAGE)[ _-]?\d+>"),
    VIDEO_MARK: re.compile(r"<[Vv](?:ideo|IDEO)[ _-]?\d+>"),
}
_OTHER_MARKS = {
    IMAGE_MARK: re.compile(_NUMBERED_MARKS[IMAGE_MARK].pattern + "|<I(?:mage|MAGE)>|&lt;image&gt;"),
    VIDEO_MARK: re.compile(_NUMBERED_MARKS[VIDEO_MARK].pattern + "|<V(?:ideo|IDEO)>|&lt;video&gt;"),
}
_TURNS = (
    "messages", "conversations", "prompt", "completion", "question", "problem", "chosen", "rejected",
    "rejected_messages",
)  # fmt: skip
_BEGIN_OF_TURNS = re.compile(r"""\s*\[\s*\{\s*(["'])(?:role|content|from|value)\1\s*:""")
_BEGIN_OF_PARTS = re.compile(r'\s*\[\s*\{\s*"(?:type|text|image|video)"\s*:')
_PRINTED_PARTS = re.compile(r"\s*\[\s*\{\s*'type':\s*'(?:text',\s*'text':|(?:image|video)'\s*[,}])")
_OF_PARTS = {kind: {kind, "url", "path"} for kind in ("text", "image", "video")}
_OF_PARTS["image"] |= {"base64", "source"}
_OF_PARTS["video"] |= {"fps", "sample_fps"}
_OF_PARTS |= {"image_url": {"image_url"}, "input_image": {"image_url"}, "input_text": {"text"}}
_MASKS = ("loss", "weight")  # keys of a turn that say whether it is trained on
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # keys of a turn with the thought before its text
_LONGEST_REASON = 5000  # characters; a reason may name a path, which may have up to 4096

ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}


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


def shortened(text: str) -> str:
    """Shorten a reason or a field for bad_rows.jsonl, because it may quote text of the row."""
    return brief(text, _LONGEST_REASON)


def given(record: Mapping[str, Any], key: str) -> bool:
    """Return whether a key has a value other than null: Parquet writes null for a key that a row does not have."""
    return record.get(key) is not None


def is_filled(value: Any) -> bool:
    """Return whether a value says anything: tables write null, an empty text, list or object, or an object of nulls
    for what a row does not have."""
    if value is None or isinstance(value, str | list):
        return bool(value)
    return not isinstance(value, dict | Mapping) or any(each is not None for each in value.values())


def whole(value: Any) -> Any:
    """Return a whole number as an int, also if a table holds it as a float, as in a column in which some are missing;
    any other value stays as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_number(value: Any) -> bool:
    """Return whether a value is a finite int or float. A bool is neither."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def read_messages(
    value: Any, field: str, *, role_key: str = "role", content_key: str = "content", roles: Mapping[str, Role] = ROLES
) -> tuple[Message, ...]:
    """Read turns from a list of objects. `roles` maps each role of the format to tiercel's role."""
    if not isinstance(value, list) or not value:
        raise wrong_value(value, "it must be a list of turns, at least one", field)
    known = {role_key, content_key, *_MASKS, *_THOUGHTS}
    messages = []
    for number, turn in enumerate(value):
        place = f"{field}[{number}]"
        if not isinstance(turn, dict | Mapping):  # the first is quick
            raise DataError(told("turn that is no object", _brief(turn), role_key, content_key), field=place)
        # A key such as "tool_calls" changes what the turn means, so it must not be ignored.
        if not turn.keys() <= known and (
            unknown := sorted(key for key in turn if key not in known and is_filled(turn[key]))
        ):
            names = brief(", ".join(unknown), 200)
            raise DataError(f"has keys that tiercel does not know: {names}; remove them", field=place)
        role = turn.get(role_key)
        if not isinstance(role, str) or role not in roles:
            raise DataError(f"is {_brief(role)}, but must be one of {', '.join(roles)}", field=f"{place}.{role_key}")
        content = read_content(turn.get(content_key), f"{place}.{content_key}")
        content = _thought(turn, roles[role], content, place) + content
        messages.append(Message(role=roles[role], content=content, is_trained=_is_trained(turn, roles[role], place)))
    return tuple(messages)


def _is_trained(turn: Mapping[str, Any], role: Role, place: str) -> bool:
    """Return whether SFT trains on a turn: `loss` as in ms-swift, or `weight` as in OpenAI's format."""
    keys = [key for key in _MASKS if given(turn, key)]
    if not keys:
        return True
    value, field = turn[keys[0]], f"{place}.{keys[0]}"
    if len(keys) > 1 or not is_truth(value):
        raise wrong_value(value, "it must be true, false, 1 or 0, and a turn has only one of loss and weight", field)
    if value and role != "assistant":
        raise DataError(f"is set on a {role} turn, which is never trained on; remove the key", field=field)
    return bool(value)


def _thought(turn: Mapping[str, Any], role: Role, content: str, place: str) -> str:
    """Return the thought of an assistant's turn, in the form in which its text would have it."""
    keys = [key for key in _THOUGHTS if turn.get(key) not in (None, "")]
    if not keys:
        return ""
    value, field = turn[keys[0]], f"{place}.{keys[0]}"
    if len(keys) > 1 or not isinstance(value, str):
        raise wrong_value(value, f"it must be text, and a turn has only one of {', '.join(_THOUGHTS)}", field)
    if role != "assistant" or content.lstrip().startswith("<think>"):
        raise DataError(told("thought of another role"), field=field)
    return "<think>\n" + value.strip("\n") + "\n</think>\n\n"


def is_truth(value: Any) -> bool:
    """Return whether a value means yes or no: a bool, 1 or 0."""
    return type(value) in (bool, int, float) and value in (0, 1)


def with_turns_of_text(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Parse a list of turns that a column has as JSON text; any other text stays as it is. Raises DataError for a list
    in the form in which Python prints it, which would otherwise be taken for a question."""
    return {key: _turns_of_text(value, key) if key in _TURNS else value for key, value in record.items()}


def _turns_of_text(value: Any, field: str) -> Any:
    if not isinstance(value, str) or (begin := _BEGIN_OF_TURNS.match(value)) is None:
        return value
    try:
        turns = json.loads(value)
    except (ValueError, RecursionError) as error:
        if begin[1] == '"':
            return value
        raise DataError(told("printed turns"), field=field) from error
    return turns if isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns) else value


def read_content(value: Any, field: str) -> str:
    """Read a turn's text. A list of parts of the types text, image and video, which may be JSON text as in tables whose
    columns have one type, becomes text with marks."""
    if isinstance(value, str):
        if (parts := parts_of_text(value, field)) is None:
            return value
        value = parts
    if not isinstance(value, list):
        raise wrong_value(value, "it must be text or a list of text and image parts", field)
    pieces = []
    for number, part in enumerate(value):
        place = f"{field}[{number}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        extra = [key for key in part if key != "type" and is_filled(part[key])] if kind else []
        if kind in ("text", "input_text") and set(extra) <= {"text"} and isinstance(part.get("text"), str):
            pieces.append(part["text"])
        elif kind in ("image", "video") and not extra:
            pieces.append(f"<{kind}>")
        elif kind in ("image", "video"):
            names = brief(", ".join(sorted(extra)), 200)
            if kind == "video":
                raise DataError(told("settings of a video", names), field=place)
            if any("pixels" in key or key.startswith("resized") for key in extra):
                raise DataError(told("pixels of a part", names), field=place)
            raise DataError(f"a part of type {kind} can have only its address; remove {names}", field=place)
        else:
            raise wrong_value(part, 'a part must be {"type": "text", "text": ...} or {"type": "image"}', place)
    return "".join(pieces)


def parts_of_text(text: str, field: str) -> list[Any] | None:
    """Parse a list of parts that is JSON text; None for any other text, such as an answer that is JSON itself. Raises
    DataError for a list as Python prints it."""
    if _PRINTED_PARTS.match(text):
        raise DataError("is a list of parts as printed by Python; use the list itself, or JSON", field=field)
    if not _BEGIN_OF_PARTS.match(text):
        return None
    try:
        parts = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return parts if all(isinstance(part, dict) and _is_part(part) for part in parts) else None


def _is_part(part: Mapping[str, Any]) -> bool:
    keys = {key for key in part if key != "type" and given(part, key)}
    return isinstance(part.get("type"), str) and part["type"] in _OF_PARTS and keys <= _OF_PARTS[part["type"]]


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


def only_last_turn(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Train only on the last assistant turn; on none if the row itself excludes that turn."""
    last = max((number for number, message in enumerate(messages) if message.role == "assistant"), default=None)
    return tuple(
        replace(message, is_trained=False) if message.role == "assistant" and number != last else message
        for number, message in enumerate(messages)
    )


def fill_prompt(
    messages: Sequence[Message], template: str, columns: Mapping[str, Any], of: str = "data.prompt"
) -> tuple[Message, ...]:
    """Replace the last user turn by `template`, with {prompt} and columns filled in. `of` names the template in
    errors."""
    last = max(number for number, message in enumerate(messages) if message.role == "user")

    def value(name: str) -> str:
        if name == "prompt":
            return messages[last].content
        given_value = column(columns, name)
        if given_value is None:
            raise DataError(f"is missing, but {of} contains {{{name}}}", field=name)
        if isinstance(given_value, dict | list | bool):
            return json.dumps(given_value, ensure_ascii=False)
        return str(given_value)

    pieces = (text + (value(name) if name else "") for text, name, *_ in Formatter().parse(template))
    worded = replace(messages[last], content="".join(pieces))
    return (*messages[:last], worded, *messages[last + 1 :])


def read_pixels(record: Mapping[str, Any]) -> PixelLimits | None:
    """Read the row's own `min_pixels` and `max_pixels`."""
    least, most = whole(record.get("min_pixels")), whole(record.get("max_pixels"))
    for key, value in (("min_pixels", least), ("max_pixels", most)):
        if value is not None and (type(value) is not int or value < 1):
            raise DataError(f"is {_brief(value)}, but must be a positive integer", field=key)
    if least is not None and most is not None and least > most:
        raise DataError(f"is {least}, but must be at most the row's max_pixels, {most}", field="min_pixels")
    return None if least is None and most is None else PixelLimits(least=least, most=most)


def require_turns(messages: Sequence[Message], purpose: Purpose, field: str) -> None:
    """Raise DataError unless a system turn comes first, there is a user turn and, except for GRPO, an assistant turn
    after it that is trained on."""
    roles = [message.role for message in messages]
    if "system" in roles[1:]:
        raise DataError("a system turn may only come first", field=f"{field}[{roles.index('system', 1)}]")
    if "user" not in roles:
        reason = "there is no user turn to sample after" if purpose == "grpo" else "there is no user turn to answer"
        raise DataError(reason, field=field)
    if purpose in ("pairs", "labels") and roles[-1] != "assistant":
        raise DataError("the last turn is not an assistant turn", field=field)
    if purpose in ("pairs", "labels") and roles[-2:] == ["assistant", "assistant"]:
        raise DataError("the answer follows another answer, not a question; remove one of them", field=field)
    if purpose != "grpo":
        if "assistant" not in roles:
            raise DataError("there is no assistant turn to train on", field=field)
        if roles.index("assistant") < roles.index("user"):
            raise DataError("the first assistant turn comes before any user turn", field=field)
        if not any(message.role == "assistant" and message.is_trained for message in messages):
            raise DataError("every assistant turn is excluded from the loss", field=field)


def fill_references(messages: tuple[Message, ...], references: Sequence[str]) -> tuple[Message, ...]:
    """Replace each <ref-object> mark by its text."""
    count = count_marks(messages, REFERENCE_MARK)
    if count != len(references):
        raise DataError(told("number of references", len(references), REFERENCE_MARK, count), field="objects.ref")
    if not references:
        return messages
    for number, reference in enumerate(references):
        if any(mark in reference for mark in (IMAGE_MARK, VIDEO_MARK, BOX_MARK, REFERENCE_MARK)):
            raise DataError(f"{_brief(reference)} contains a mark itself", field=f"objects.ref[{number}]")
    remaining = iter(references)
    filled = [re.sub(REFERENCE_MARK, lambda _: next(remaining), message.content) for message in messages]
    return tuple(replace(message, content=content) for message, content in zip(messages, filled, strict=True))


def place_marks(
    messages: tuple[Message, ...], mark: str, count: int, field: str, columns: Mapping[str, Any]
) -> tuple[Message, ...]:
    """Return the messages with one mark for each image or video. If they have no mark, all marks are put at the start
    of the first user turn. Raises DataError if the number of marks differs, with the column that may have the files, or
    if another framework's marks stand in place of all."""
    marks = count_marks(messages, mark)
    kind: MediaKind = "image" if mark == IMAGE_MARK else "video"
    if not marks:
        _require_no_other_marks(messages, (_OTHER_MARKS if count else _NUMBERED_MARKS)[mark], kind, field)
    if marks == count:
        return messages
    if marks:
        reason = f"the number of {mark} marks is {marks}, but the number of {kind}s is {count}"
        if not count and (name := column_of_files(columns, kind)) is not None:
            reason = f"{reason}; the column {name} seems to name them: set data.columns: {{{kind}s: {name}}}"
        raise DataError(reason, field=field)
    first = next(number for number, message in enumerate(messages) if message.role == "user")
    opened = Message(role="user", content=mark * count + messages[first].content)
    return (*messages[:first], opened, *messages[first + 1 :])


def _require_no_other_marks(messages: Sequence[Message], marks: re.Pattern[str], kind: MediaKind, field: str) -> None:
    for message in messages:
        if message.role == "assistant" or (other := marks.search(message.content)) is None:
            continue
        if kind == "image":
            raise DataError(told("other mark of image", message.role, other[0]), field=field)
        raise DataError(told("other mark of video", message.role, other[0]), field=field)


def answer_start(messages: Sequence[Message]) -> int:
    """Return the place after the last user turn; 0 if there is none."""
    return max((number + 1 for number, message in enumerate(messages) if message.role == "user"), default=0)


def count_marks(messages: Sequence[Message], mark: str) -> int:
    """Count how often `mark` is in the messages."""
    return sum([message.content.count(mark) for message in messages])


def _answer_image(draft: RowDraft, messages: Sequence[Message]) -> int | None:
    """Return the number of the image that boxes of the right answer lie on: the one that the row gives; or else the one
    that the boxes after the last question lie on, or all its boxes if there are none, and None if these lie on several
    images; or else the first."""
    if draft.answer_image is not None:
        if not 0 <= draft.answer_image < len(draft.images):
            there = counted(len(draft.images), "image")
            raise DataError(told("answer on no image", _brief(draft.answer_image), there), field="answer_image")
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


def wrong_value(value: Any, wanted: str, field: str) -> DataError:
    """Make the error that shows a wrong value and says what is wanted instead."""
    return DataError(f"is {_brief(value)}, but {wanted}", field=field)


def _brief(value: Any) -> str:
    """Shorten a value for a message."""
    if value is None:
        return "missing"
    return brief(repr(value), 80) if not isinstance(value, bytes) else "bytes"
