"""Convert rows of each format that tiercel reads, and find out the format of a file.

tiercel   {"messages": [...], "images": [...], "answer": ..., "boxes": [...]}
swift     ms-swift: messages (or query, response, history, system), images, objects, solution
vlm_r1    VLM-R1: conversations of human and gpt turns (or problem), image, solution
sharegpt  LLaMA-Factory: conversations of human and gpt turns, system, images
alpaca    LLaMA-Factory: instruction, input, output, history, system, images
openai    OpenAI: messages whose content has text and image_url parts; pictures are data: URLs or paths
trl       TRL: prompt with completion, or with chosen and rejected (preferences.py)
rlhf_v    RLHF-V: image, question, chosen, rejected
qa        images, question (or problem) and answer, as Geometry3K and most sets of questions on pictures have them
verl      prompt as a list of turns, reward_model with ground_truth
refcoco   referring expressions: image, bbox as [x, y, width, height], expression (or several in sentences)

All formats except openai take their images from `images` or `image`. Everything that is not part of the conversation
stays a column. So do `solution`, `label` and `objects`, because rewards that were written for those frameworks use
them by name.
"""

import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from os.path import basename, splitext
from typing import Any

from tiercel.config.data import FormatName
from tiercel.data.formats.columns import foreign_columns, require_plain, require_plain_value
from tiercel.data.formats.preferences import SIDES, label_of, pair_in_text, without
from tiercel.data.media.embedded import has_image_parts, read_image_parts
from tiercel.data.rows import (
    BOX_MARK,
    REFERENCE_MARK,
    ROLES,
    Reading,
    Role,
    RowDraft,
    answer_start,
    count_marks,
    finish,
    given,
    is_number,
    read_box_images,
    read_boxes,
    read_content,
    read_image_number,
    read_images,
    read_messages,
    read_pixels,
    read_videos,
    shortened,
    with_turns_of_text,
)
from tiercel.errors import DataError
from tiercel.samples import column
from tiercel.types import Message, RejectedRow, Row

_SHARE_GPT_ROLES: dict[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}

_OPENAI_ROLES: dict[str, Role] = {"system": "system", "developer": "system", **ROLES}
VERL_ANSWER = "reward_model.ground_truth"
_QUESTIONS = ("question", "problem", "prompt")  # what a question is called beside its answer
_EXPRESSIONS = ("expression", "caption", "sentence", "sent")
_SEVERAL = ("sentences", "captions")
# What any format reads; of every other column a value that JSON does not know is left out.
# fmt: off
_READ = frozenset((
    "id", "messages", "conversations", "query", "response", "history", "system", "instruction", "input", "output",
    "prompt", "completion", "question", "problem", "chosen", "rejected", "rejected_response", "rejected_messages",
    "label", "kto_tag", "objects", "boxes", "box_images", "bbox", "file_name", "answer", "solution",
    "reward_model", "min_pixels", "max_pixels", "tools", "functions", "audio", "audios", "text",
    *_EXPRESSIONS, *_SEVERAL,
))
# fmt: on


def from_tiercel(record: Mapping[str, Any]) -> RowDraft:
    """Read tiercel's own rows."""
    boxes = read_boxes(record["boxes"], "boxes") if given(record, "boxes") else ()
    messages = read_messages(record.get("messages"), "messages")
    draft = _draft(record, messages, read=("messages", "answer", "boxes", "box_images"), answers=())
    box_images = read_box_images(record.get("box_images"), "box_images", len(boxes))
    answer = record["answer"] if given(record, "answer") else draft.answer
    return replace(draft, answer=answer, boxes=boxes, box_images=box_images)


def from_swift(record: Mapping[str, Any]) -> RowDraft:
    """Read ms-swift's rows: the standard form with `messages`, or `query` and `response`."""
    _refuse(record, "audios", "audio", "tools")
    messages = _swift_messages(record)
    objects = _objects(record.get("objects"))
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
        box_space="unit" if kind == "norm1" else None,
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
    answers = ("solution", "answer") if field == "problem" else ("solution",)
    draft = _draft(record, messages, field, read=("conversations",), answers=answers, otherwise=last)
    return replace(draft, named=_named_by_vlm_r1(messages, last))


def _named_by_vlm_r1(messages: Sequence[Message], last: Any) -> dict[str, Any]:
    """Make what VLM-R1 makes of a conversation for its rewards: problem, and the answer in tags."""
    asked = next((message.content for message in reversed(messages) if message.role == "user"), "")
    named = {"problem": asked.replace("<image>", ""), "accu_reward_method": "default"}
    if last is not None:
        answer = last.replace("<answer>", "").replace("</answer>", "").strip() if isinstance(last, str) else last
        named["solution"] = f"<answer> {answer} </answer>"
    return named


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
        box_space="pixels",
        answer_space="pixels",
        boxes_are_sides=True,
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


def from_qa(record: Mapping[str, Any]) -> RowDraft:
    """Read a question, as text or as turns, and its answer, which is also the assistant turn where it is text, a number
    or a list of numbers and no turn of the assistant is there."""
    _refuse(record, "tools", "chosen", "rejected")
    field = next((key for key in _QUESTIONS if given(record, key)), _QUESTIONS[0])
    asked = record.get(field)
    turns = list(asked) if isinstance(asked, list) else [{"role": "user", "content": read_content(asked, field)}]
    draft = _draft(record, read_messages(turns, field), field, read=(field,), answers=("answer", "solution"))
    if draft.messages[-1].role != "user" or draft.answer is None:
        return draft
    given_answer = record.get("answer") if given(record, "answer") else draft.answer
    text = _answer_text(given_answer)
    answered = () if text is None else (Message(role="assistant", content=text),)
    return replace(draft, messages=(*draft.messages, *answered))


def _answer_text(answer: Any) -> str | None:
    """Write an answer as a turn; None where it is not one answer, such as a list of admissible texts."""
    if isinstance(answer, str):
        return answer
    numbers = answer if isinstance(answer, list) else [answer]
    if not numbers or not all(is_number(number) for number in numbers):
        return None
    # A column of whole numbers in which one is missing is read from Parquet as one of fractions.
    is_whole = isinstance(answer, float) and answer.is_integer()
    return json.dumps(int(answer) if is_whole else answer)


def _is_plain_question(format: FormatName, record: Mapping[str, Any]) -> bool:
    """Whether a record has nothing of what its file's format reads, but a question with an answer beside it: then it is
    read as what it is."""
    keys = FORMATS[format].turns
    is_answered = given(record, "answer") or column(record, VERL_ANSWER) is not None
    return bool(keys) and not any(given(record, key) for key in keys) and is_answered and _has_question(record)


def _has_question(record: Mapping[str, Any]) -> bool:
    return any(given(record, key) for key in _QUESTIONS)


def convert(format: FormatName, record: Mapping[str, Any]) -> RowDraft:
    """Read a record of a file of that format."""
    return from_qa(record) if _is_plain_question(format, record) else FORMATS[format].convert(record)


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
    answer is in the first column of `answers` that the row has, else where verl has it, `otherwise` where it has none;
    a column `answer` that it was read from is no column of the row."""
    key = next((key for key in answers if given(record, key)), None)
    found = column(record, VERL_ANSWER) if key is None else record[key]
    return RowDraft(
        messages=messages,
        messages_field=field,
        images=read_images(record),
        videos=read_videos(record),
        answer=clean_answer(otherwise if found is None else found),
        answer_image=read_image_number(record.get("answer_image"), "answer_image"),
        columns=_columns(record, *read, *(["answer"] if key == "answer" else [])),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFormat:
    """Reads one format. The texts are for messages and for the table of docs/data.md."""

    convert: Callable[[Mapping[str, Any]], RowDraft]
    rows: str
    marks: str  # the keys that tell it from other formats
    answer: str  # where the right answer comes from
    turns: tuple[str, ...] = ()  # where the turns may be; a row with none of these may be a plain question


_LAST_TURN = "the gpt turn that ends the conversation"
FORMATS: dict[FormatName, DataFormat] = {
    "tiercel": DataFormat(
        convert=from_tiercel,
        rows="tiercel's own rows",
        marks="messages, with images, answer or boxes",
        answer="`answer`",
        turns=("messages",),
    ),
    "swift": DataFormat(
        convert=from_swift,
        rows="ms-swift's rows: the standard form with `messages`, or `query` and `response`",
        marks="messages with solution, label, objects or system; query, response",
        answer="`solution`, else `answer`, else `label`",
        turns=("messages", "query", "response", "history"),
    ),
    "vlm_r1": DataFormat(
        convert=from_vlm_r1,
        rows="VLM-R1's rows",
        marks="conversations, or problem with solution",
        answer=f"`solution`, else {_LAST_TURN}; beside `problem` also `answer`",
        turns=("conversations", "problem"),
    ),
    "sharegpt": DataFormat(
        convert=from_sharegpt,
        rows="LLaMA-Factory's ShareGPT rows",
        marks="conversations with system, tools, chosen or kto_tag",
        answer=f"`solution`, else `answer`, else {_LAST_TURN}",
        turns=("conversations",),
    ),
    "alpaca": DataFormat(
        convert=from_alpaca,
        rows="LLaMA-Factory's Alpaca rows: instruction and input are the last question, output is its answer",
        marks="instruction with output or chosen",
        answer="`solution`, else `answer`, else `output`",
        turns=("instruction", "input", "output"),
    ),
    "openai": DataFormat(
        convert=from_openai,
        rows="OpenAI's messages, each picture where its part stands",
        marks="messages with image_url parts",
        answer="`answer`, else `solution`",
        turns=("messages",),
    ),
    "trl": DataFormat(
        convert=from_trl,
        rows="TRL's rows, each of prompt and answer as text or as turns",
        marks="prompt; chosen with rejected",
        answer="`answer`, else `solution`",
        turns=("prompt", "completion", "question"),
    ),
    "rlhf_v": DataFormat(
        convert=from_trl,
        rows="RLHF-V's and RLAIF-V's pairs; also as JSON in `text`",
        marks="question with chosen and rejected, or such a text",
        answer="none",
    ),
    "qa": DataFormat(
        convert=from_qa,
        rows="A question on pictures and its answer, as in Geometry3K: `question` or `problem`, with images",
        marks="question or problem, with answer",
        answer="`answer`, else `solution`; for SFT it is also the assistant turn",
    ),
    "verl": DataFormat(
        convert=from_qa,
        rows="verl's rows: `prompt` as a list of turns",
        marks="prompt with reward_model",
        answer="`answer`, else `solution`, else `reward_model.ground_truth`; for SFT also the assistant turn",
    ),
    "refcoco": DataFormat(
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
        id = id if reading.ids == "line" else _read_id(record, id)
        left_out = foreign_columns(record, _READ)
        record = with_turns_of_text(without(record, *left_out))
        require_plain(record)

        draft_of = partial(convert, format)

        def row_of(draft: RowDraft) -> Row:
            row = finish(draft, reading, id=id, line=line, pixels=read_pixels(record))
            kept = {"id": record["id"]} if reading.ids == "line" and given(record, "id") else {}
            return replace(row, columns={**kept, **row.columns}, left_out=tuple(left_out.items()))

        if reading.purpose == "labels":
            label, unlabelled = label_of(record)
            return replace(row_of(draft_of(unlabelled)), label=label)
        if reading.purpose == "pairs":
            return paired(*map(row_of, split_shared_turns(*map(draft_of, SIDES[format](record)))))
        return row_of(draft_of(record))
    except DataError as error:
        field, reason = shortened(error.field), shortened(str(error))
        return RejectedRow(id=id, file=file, line=line, field=field, reason=reason)
    except RecursionError:  # from a message that shows the wrong value
        return RejectedRow(id=id, file=file, line=line, field="row", reason="is nested too deeply")


def split_shared_turns(chosen: RowDraft, rejected: RowDraft) -> tuple[RowDraft, RowDraft]:
    """Share out boxes and references that a pair lists once for both answers: first those of the question, then those
    of the chosen answer, then those of the rejected one, as ms-swift does. What fits each side alone stays."""
    asked = [answer_start(side.messages) for side in (chosen, rejected)]
    if chosen.messages[: asked[0]] != rejected.messages[: asked[1]]:
        return chosen, rejected

    def parts(mark: str, listed: int) -> tuple[slice, slice] | None:
        """Return of a list for both the part up to the rejected answer's, and that answer's."""
        of_question = count_marks(chosen.messages[: asked[0]], mark)
        first, second = (count_marks(side.messages, mark) - of_question for side in (chosen, rejected))
        if listed != of_question + first + second:
            return None
        return slice(of_question), slice(of_question + first, None)

    if (found := parts(BOX_MARK, len(chosen.boxes))) is not None:
        both, own = found
        last = own.start
        boxes, images = rejected.boxes, rejected.box_images
        rejected = replace(rejected, boxes=boxes[both] + boxes[own], box_images=images[both] + images[own])
        chosen = replace(chosen, boxes=boxes[:last], box_images=images[:last])
    if (found := parts(REFERENCE_MARK, len(chosen.references))) is not None:
        both, own = found
        names = rejected.references
        rejected = replace(rejected, references=names[both] + names[own])
        chosen = replace(chosen, references=names[: own.start])
    return chosen, rejected


def paired(chosen: Row, rejected: Row) -> Row:
    """Make the row of a pair. Raises DataError where both sides are equal."""
    sides = [(side.messages, side.boxes, side.box_images, side.visuals) for side in (chosen, rejected)]
    if sides[0] == sides[1]:
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
    elif {"prompt", "reward_model"} <= has:
        found.add("verl")
    elif not has & {"conversations", "instruction"} and ("prompt" in has or {"chosen", "rejected"} <= has):
        found.add("trl")
    elif _is_qa(has):
        found.add("qa")
    if "conversations" in has and has & {"system", "tools", "chosen", "kto_tag"}:
        found.add("sharegpt")
    elif "conversations" in has or ({"problem", "solution"} <= has and "messages" not in has):
        found.add("vlm_r1")
    if "instruction" in has and has & {"output", "chosen"} and "messages" not in has:
        found.add("alpaca")
    if "bbox" in has and has & {*_EXPRESSIONS, *_SEVERAL} and not has & {"messages", "conversations", "problem"}:
        found.add("refcoco")
    return found


def _is_qa(has: Set[str]) -> bool:
    """Whether keys are those of a question and its answer, and of no other format."""
    others = {"conversations", "instruction", "bbox"}
    return "answer" in has and ("question" in has or ("problem" in has and "solution" not in has)) and not has & others


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


def _objects(value: Any) -> Any:
    """Read objects that are written as JSON text, which keeps their types in tables."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"is text, but not JSON: {error}", field="objects") from error


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
