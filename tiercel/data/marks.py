"""Place and fill the marks in a row's messages: <image>, <video>, <bbox>, <ref-object>, and a recipe's prompt."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from string import Formatter
from typing import Any

from tiercel.data.media.file_names import MediaKind, column_of_files
from tiercel.data.record_values import brief_value
from tiercel.data.texts import told
from tiercel.errors import DataError
from tiercel.reward_types import column
from tiercel.types import Message

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


def fill_references(messages: tuple[Message, ...], references: Sequence[str]) -> tuple[Message, ...]:
    """Replace each <ref-object> mark by its text."""
    count = count_marks(messages, REFERENCE_MARK)
    if count != len(references):
        raise DataError(told("number of references", len(references), REFERENCE_MARK, count), field="objects.ref")
    if not references:
        return messages
    for number, reference in enumerate(references):
        if any(mark in reference for mark in (IMAGE_MARK, VIDEO_MARK, BOX_MARK, REFERENCE_MARK)):
            raise DataError(f"{brief_value(reference)} contains a mark itself", field=f"objects.ref[{number}]")
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


def count_marks(messages: Sequence[Message], mark: str) -> int:
    """Count how often `mark` is in the messages."""
    return sum([message.content.count(mark) for message in messages])
