"""Convert rows of each format that tiercel reads, and find out the format of a file.

tiercel   {"messages": [...], "images": [...], "answer": ..., "boxes": [...]}
swift     ms-swift: messages (or query, response, history, system), images, objects, solution
vlm_r1    VLM-R1: conversations of human and gpt turns (or problem), image, solution
sharegpt  LLaMA-Factory: conversations of human and gpt turns, system, images
alpaca    LLaMA-Factory: instruction, input, output, history, system, images
openai    OpenAI: messages whose content has text and image_url parts; pictures are data: URLs or paths
trl       TRL: prompt with completion, or with chosen and rejected (preferences.py)
rlhf_v    RLHF-V: image, question, chosen, rejected
refcoco   referring expressions: image, bbox as [x, y, width, height], expression (or several in sentences)

All formats except openai take their images from `images` or `image`. Everything that is not part of the conversation
stays a column. So do `solution`, `label` and `objects`, because rewards that were written for those frameworks use
them by name.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import basename, splitext
from typing import Any

from tiercel.config.data import FormatName
from tiercel.data.image_parts import has_image_parts, read_image_parts
from tiercel.data.plain import require_plain, require_plain_value
from tiercel.data.preferences import SIDES, label_of, pair_in_text, without
from tiercel.data.rows import (
    BOX_MARK,
    ROLES,
    Reading,
    Role,
    RowDraft,
    finish,
    given,
    is_number,
    read_box_images,
    read_boxes,
    read_content,
    read_images,
    read_messages,
    read_pixels,
    read_videos,
    shortened,
)
from tiercel.errors import DataError
from tiercel.types import Message, RejectedRow, Row

_SHARE_GPT_ROLES: dict[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}

_OPENAI_ROLES: dict[str, Role] = {"system": "system", "developer": "system", **ROLES}
_EXPRESSIONS = ("expression", "caption", "sentence", "sent")
_SEVERAL = ("sentences", "captions")


def from_tiercel(record: Mapping[str, Any]) -> RowDraft:
    """Read tiercel's own rows."""
    boxes = read_boxes(record["boxes"], "boxes") if given(record, "boxes") else ()
    messages = read_messages(record.get("messages"), "messages")
    draft = _draft(record, messages, read=("messages", "answer", "boxes", "box_images"), answers=())
    box_images = read_box_images(record.get("box_images"), "box_images", len(boxes))
    return replace(draft, answer=record.get("answer"), boxes=boxes, box_images=box_images)


def from_swift(record: Mapping[str, Any]) -> RowDraft:
    """Read ms-swift's rows: the standard form with `messages`, or `query` and `response`."""
    _refuse(record, "audios", "audio", "tools")
    messages = _swift_messages(record)
    objects = record.get("objects")
    if objects is not None and not isinstance(objects, Mapping):
        raise DataError('must be an object {"ref": [...], "bbox": [...]}', field="objects")
    objects = objects or {}
    kind = objects.get("bbox_type") or "real"
    if kind not in ("real", "norm1"):
        raise DataError(f"is {kind!r}; known are real (pixels) and norm1 (0 to 1)", field="objects.bbox_type")
    boxes = read_boxes(objects.get("bbox") or [], "objects.bbox")
    read = ("messages", "system", "query", "response", "history")
    return replace(
        _draft(record, messages, read=read, answers=("solution", "answer", "label")),
        references=_references(objects.get("ref")),
        boxes=boxes,
        box_images=read_box_images(objects.get("image_id"), "objects.image_id", len(boxes)),
        boxes_are_unit=kind == "norm1",
        boxes_field="objects.bbox",
    )


def from_vlm_r1(record: Mapping[str, Any]) -> RowDraft:
    """Read VLM-R1's rows. The answer is `solution`, otherwise the gpt turn that ends the conversation."""
    field, last = "conversations", None
    if given(record, field):
        messages, last = _conversation(record[field])
    else:
        field = "problem"
        messages = (Message(role="user", content=read_content(record.get(field), field)),)
    return _draft(record, messages, field, read=("conversations",), answers=("solution",), otherwise=last)


def from_sharegpt(record: Mapping[str, Any]) -> RowDraft:
    """Read LLaMA-Factory's ShareGPT rows. The answer is `solution` or `answer`, otherwise the gpt turn that ends the
    conversation."""
    _refuse(record, "audios", "tools", "chosen", "rejected")
    messages, last = _conversation(record.get("conversations"))
    messages = _after_system(_system_turn(record.get("system") or None), messages)
    answers = ("solution", "answer")
    return _draft(record, messages, "conversations", read=("conversations", "system"), answers=answers, otherwise=last)


def from_alpaca(record: Mapping[str, Any]) -> RowDraft:
    """Read LLaMA-Factory's Alpaca rows: instruction and input are the last question, output is its answer."""
    _refuse(record, "audios", "tools", "chosen", "rejected")
    asked = [read_content(record[key], key) for key in ("instruction", "input") if record.get(key)]
    turns = [*_system_turn(record.get("system") or None), *_history_turns(record.get("history"))]
    turns += [Message(role="user", content="\n".join(asked)), *_answer_turn(record, "output")]
    read = ("instruction", "input", "output", "history", "system")
    return _draft(record, tuple(turns), "instruction", read=read, answers=("solution", "answer", "output"))


def from_openai(record: Mapping[str, Any]) -> RowDraft:
    """Read OpenAI's messages, with each image at the place of its part. The answer is `answer` or `solution`."""
    _refuse(record, "tools", "functions")
    record = _without_videos(record)
    if given(record, "images") or given(record, "image"):
        raise DataError("pictures are image_url parts in this format; remove the column", field="images")
    turns, images = read_image_parts(record.get("messages"), "messages")
    messages = read_messages(turns, "messages", roles=_OPENAI_ROLES)
    return replace(_draft(record, messages, read=("messages", "answer"), answers=("answer", "solution")), images=images)


def from_refcoco(record: Mapping[str, Any]) -> RowDraft:
    """Read a referring expression and its box in COCO's [x, y, width, height]. The user turn is the expression; the
    assistant turn and the answer are the box as [x1, y1, x2, y2]."""
    record = _without_videos(record)
    corner = record.get("bbox")
    if not isinstance(corner, list) or len(corner) != 4 or not all(is_number(number) for number in corner):
        raise DataError("must be 4 numbers [x, y, width, height]", field="bbox")
    x, y, width, height = corner
    boxes = read_boxes([[x, y, x + width, y + height]], "bbox")
    key = next((key for key in _EXPRESSIONS if given(record, key)), "expression")
    question = Message(role="user", content=read_content(record.get(key), key))
    image = {"image": record["file_name"]} if given(record, "file_name") and not given(record, "image") else record
    return RowDraft(
        messages=(question, Message(role="assistant", content=BOX_MARK)),
        messages_field=key,
        images=read_images(image),
        answer=list(boxes[0]),
        columns={**_columns(record, "bbox", key), "expression": record.get(key)},
        boxes=boxes,
        box_images=(0,),
        boxes_field="bbox",
        boxes_are_inside=True,
    )


def from_trl(record: Mapping[str, Any]) -> RowDraft:
    """Read TRL's rows: a prompt, and the completion where there is one, each text or a list of turns. A completion
    alone is a whole conversation. RLHF-V's prompt is `question`, which beside a prompt is a column."""
    _refuse(record, "tools", "chosen", "rejected")
    turns: list[Any] = []
    asked = "prompt" if given(record, "prompt") else "question"
    for key, role in ((asked, "user"), ("completion", "assistant")):
        value = record.get(key)
        turns += value if isinstance(value, list) else [] if value is None else [{"role": role, "content": value}]
    messages, read = read_messages(turns, "prompt"), ("prompt", asked, "completion")
    return _draft(record, messages, "prompt", read=read, answers=("answer", "solution"))


def _draft(
    record: Mapping[str, Any],
    messages: tuple[Message, ...],
    field: str = "messages",
    *,
    read: tuple[str, ...],
    answers: tuple[str, ...],
    otherwise: Any = None,
) -> RowDraft:
    """Make a draft of turns that were read from the columns `read`, with the record's images and videos. The right
    answer is in the first column of `answers` that the row has, `otherwise` where it has none; a column `answer` that
    it was read from is no column of the row."""
    key = next((key for key in answers if given(record, key)), None)
    return RowDraft(
        messages=messages,
        messages_field=field,
        images=read_images(record),
        videos=read_videos(record),
        answer=clean_answer(otherwise if key is None else record[key]),
        columns=_columns(record, *read, *(["answer"] if key == "answer" else [])),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """Reads one format. The texts are for messages and for the table of docs/data.md."""

    convert: Callable[[Mapping[str, Any]], RowDraft]
    rows: str
    marks: str  # the keys that tell it from other formats
    answer: str  # where the right answer comes from


_LAST_TURN = "the gpt turn that ends the conversation"
FORMATS: dict[FormatName, Format] = {
    "tiercel": Format(
        convert=from_tiercel,
        rows="tiercel's own rows",
        marks="messages, with images, answer or boxes",
        answer="`answer`",
    ),
    "swift": Format(
        convert=from_swift,
        rows="ms-swift's rows: the standard form with `messages`, or `query` and `response`",
        marks="messages with solution, label, objects or system; query, response",
        answer="`solution`, else `answer`, else `label`",
    ),
    "vlm_r1": Format(
        convert=from_vlm_r1,
        rows="VLM-R1's rows",
        marks="conversations, or problem with solution",
        answer=f"`solution`, else {_LAST_TURN}",
    ),
    "sharegpt": Format(
        convert=from_sharegpt,
        rows="LLaMA-Factory's ShareGPT rows",
        marks="conversations with system, tools, chosen or kto_tag",
        answer=f"`solution`, else `answer`, else {_LAST_TURN}",
    ),
    "alpaca": Format(
        convert=from_alpaca,
        rows="LLaMA-Factory's Alpaca rows: instruction and input are the last question, output is its answer",
        marks="instruction with output or chosen",
        answer="`solution`, else `answer`, else `output`",
    ),
    "openai": Format(
        convert=from_openai,
        rows="OpenAI's messages, each picture where its part stands",
        marks="messages with image_url parts",
        answer="`answer`, else `solution`",
    ),
    "trl": Format(
        convert=from_trl,
        rows="TRL's rows, each of prompt and answer as text or as turns",
        marks="prompt; chosen with rejected",
        answer="`answer`, else `solution`",
    ),
    "rlhf_v": Format(
        convert=from_trl,
        rows="RLHF-V's and RLAIF-V's pairs; also as JSON in `text`",
        marks="question with chosen and rejected, or such a text",
        answer="none",
    ),
    "refcoco": Format(
        convert=from_refcoco,
        rows="A referring expression and its box in COCO's [x, y, width, height]: the user turn is the expression, the "
        "assistant turn and the answer are the box as [x1, y1, x2, y2]",
        marks="bbox with expression, sentences or caption",
        answer="the box as [x1, y1, x2, y2]",
    ),
}


def expanded(format: FormatName, record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Split a refcoco record with several expressions of one box into one record for each expression. Any other record
    is returned as it is, in a list."""
    key = next((key for key in _SEVERAL if given(record, key)), None)
    is_several = key is not None and isinstance(record[key], list) and bool(record[key])
    if format != "refcoco" or key is None or not is_several or given(record, "expression"):
        return [record]
    rest = {name: value for name, value in record.items() if name not in (key, "id")}
    records: list[Mapping[str, Any]] = []
    for number, each in enumerate(record[key]):
        text = each.get("sent") if isinstance(each, Mapping) else each
        id = {"id": f"{record['id']}#{number + 1}"} if given(record, "id") else {}
        records.append({**rest, **id, "expression": text})
    return records


def parse_record(
    record: Mapping[str, Any], *, format: FormatName, line: int, reading: Reading, default: str | None = None
) -> Row | RejectedRow:
    """Convert a record to a Row, or to a RejectedRow with the wrong field and the reason. `default`: the id of a row
    that has none."""
    file = reading.file
    id = default or default_id(file, line)
    try:
        id = _read_id(record, id)
        require_plain(record)

        def row_of(side: Mapping[str, Any]) -> Row:
            return finish(FORMATS[format].convert(side), reading, id=id, line=line, pixels=read_pixels(side))

        if reading.purpose == "labels":
            label, unlabelled = label_of(record)
            return replace(row_of(unlabelled), label=label)
        return paired(*map(row_of, SIDES[format](record))) if reading.purpose == "pairs" else row_of(record)
    except DataError as error:
        field, reason = shortened(error.field), shortened(str(error))
        return RejectedRow(id=id, file=file, line=line, field=field, reason=reason)
    except RecursionError:  # from a message that shows the wrong value
        return RejectedRow(id=id, file=file, line=line, field="row", reason="is nested too deeply")


def paired(chosen: Row, rejected: Row) -> Row:
    """Make the row of a pair. Raises DataError where both sides are equal."""
    if chosen.messages == rejected.messages and chosen.visuals == rejected.visuals:
        raise DataError("both answers are equal, so there is nothing to prefer", field="rejected")
    return replace(chosen, rejected=replace(rejected, columns=chosen.columns))


def default_id(file: str, line: int) -> str:
    """Return the id of a row that has none: file name and line."""
    return f"{splitext(basename(file))[0]}:{line}"


def detect_format(records: Sequence[Mapping[str, Any]], file: str) -> FormatName:
    """Find the format of a file from the keys of its first records. Raises DataError where none fits, or several do."""
    found = set[FormatName]()
    for record in records:
        found |= _formats_of(record)
    # Rows of bare messages and images read the same as tiercel's and as ms-swift's.
    if not found and any(given(record, "messages") for record in records):
        return "tiercel"
    if len(found) == 1:
        return found.pop()
    keys = ", ".join(sorted({key for record in records for key in record})) or "none"
    known = "; ".join(f"{name} ({each.marks})" for name, each in FORMATS.items())
    verdict = f"could be {' or '.join(sorted(found))}" if found else "have no known format"
    raise DataError(f"{file}: its rows {verdict}. Keys found: {keys}. Known: {known}. Set data.format.", field="format")


def _formats_of(record: Mapping[str, Any]) -> set[FormatName]:
    """Return the formats that a record's keys fit."""
    has = {key for key in record if given(record, key)}
    found = set[FormatName]()
    if "messages" in has and has_image_parts(record["messages"]):
        found.add("openai")
    elif "messages" in has:
        if has & {"objects", "solution", "label", "system", "rejected_response", "rejected_messages"}:
            found.add("swift")
        # Of an answer and a solution ms-swift would read the solution, tiercel the answer.
        if has & {"boxes", "rejected"} or {"answer", "solution"} <= has:
            found.add("tiercel")
    elif has & {"query", "response"}:
        found.add("swift")
    elif {"question", "chosen", "rejected"} <= has or pair_in_text(record) is not None:
        found.add("rlhf_v")
    elif not has & {"conversations", "instruction"} and ("prompt" in has or {"chosen", "rejected"} <= has):
        found.add("trl")
    if "conversations" in has and has & {"system", "tools", "chosen", "kto_tag"}:
        found.add("sharegpt")
    elif "conversations" in has or ({"problem", "solution"} <= has and "messages" not in has):
        found.add("vlm_r1")
    if "instruction" in has and has & {"output", "chosen"} and "messages" not in has:
        found.add("alpaca")
    if "bbox" in has and has & {*_EXPRESSIONS, *_SEVERAL} and not has & {"messages", "conversations", "problem"}:
        found.add("refcoco")
    return found


def clean_answer(value: Any) -> Any:
    """Remove the <answer> tags of an answer, and convert text that is a JSON list of numbers to that list."""
    if not isinstance(value, str):
        return value
    end = value.rfind("</answer>")
    start = value.rfind("<answer>", 0, max(end, 0))
    text = (value[start + len("<answer>") : end] if start >= 0 else value).strip()
    if not text.startswith("["):
        return text
    try:
        numbers = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return numbers if all(is_number(number) for number in numbers) else text


def _read_id(record: Mapping[str, Any], default: str) -> str:
    id = record.get("id")
    if id is None:
        return default
    if isinstance(id, bool) or not isinstance(id, str | int) or id == "":
        raise DataError(f"is {id!r}; an id is text or an integer", field="id")
    require_plain_value(id, "id", 0)
    return str(id)


def _columns(record: Mapping[str, Any], *read: str) -> dict[str, Any]:
    """Return a record without its id, its images and videos, and the keys that its format has read."""
    taken = {"id", "images", "image", "videos", "video", "min_pixels", "max_pixels", *read}
    return {key: value for key, value in record.items() if key not in taken}


def _without_videos(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Copy a record of a format without videos. Raises DataError where it has one."""
    for key in ("videos", "video"):
        if record.get(key):
            raise DataError("this format has no place for videos; write tiercel's own rows", field=key)
    return without(record, "videos", "video")


def _refuse(record: Mapping[str, Any], *keys: str) -> None:
    for key in keys:
        if record.get(key) and key in ("chosen", "rejected"):
            raise DataError("is of a preference pair; `tiercel dpo` learns from pairs", field=key)
        if record.get(key):
            raise DataError(f"tiercel trains on images, videos and text; it does not read rows with `{key}`", field=key)


def _swift_messages(record: Mapping[str, Any]) -> tuple[Message, ...]:
    system = _system_turn(record.get("system"))
    if given(record, "messages"):
        return _after_system(system, read_messages(record["messages"], "messages"))
    if not given(record, "query"):
        raise DataError("is missing; a row has `messages`, or `query` and `response`", field="messages")
    turns = [*system, *_history_turns(record.get("history"))]
    turns += [Message(role="user", content=read_content(record["query"], "query")), *_answer_turn(record, "response")]
    return tuple(turns)


def _after_system(system: tuple[Message, ...], messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Put the turn of a system column before the others. Raises DataError where they have one too."""
    if system and messages[0].role == "system":
        raise DataError("the row has a system column and a system turn; keep one", field="system")
    return (*system, *messages)


def _answer_turn(record: Mapping[str, Any], key: str) -> list[Message]:
    return [Message(role="assistant", content=read_content(record[key], key))] if given(record, key) else []


def _history_turns(value: Any) -> list[Message]:
    """Read earlier turns from pairs of a question and an answer."""
    if value and not isinstance(value, list):
        raise DataError("must be a list of pairs [query, response]", field="history")
    turns = []
    for number, pair in enumerate(value or []):
        place = f"history[{number}]"
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError("must be a pair [query, response]", field=place)
        turns.append(Message(role="user", content=read_content(pair[0], f"{place}[0]")))
        turns.append(Message(role="assistant", content=read_content(pair[1], f"{place}[1]")))
    return turns


def _system_turn(value: Any) -> tuple[Message, ...]:
    return () if value is None else (Message(role="system", content=read_content(value, "system")),)


def _references(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(reference, str) for reference in value):
        raise DataError("must be a list of texts", field="objects.ref")
    return tuple(value)


def _conversation(value: Any) -> tuple[tuple[Message, ...], Any]:
    """Read the turns of human and gpt, whose value VLM-R1 allows to be a number or a list. Returns them with the value
    of the gpt turn that ends the conversation as it was given."""
    last = None
    turns = list(value) if isinstance(value, list) else value
    for number, turn in enumerate(turns if isinstance(value, list) else []):
        last = None
        if isinstance(turn, Mapping) and turn.get("from") in ("gpt", "assistant"):
            last = turn.get("value")
            if is_number(last) or (isinstance(last, list) and last and all(is_number(item) for item in last)):
                turns[number] = {**turn, "value": json.dumps(last)}
    messages = read_messages(turns, "conversations", role_key="from", content_key="value", roles=_SHARE_GPT_ROLES)
    return messages, last
