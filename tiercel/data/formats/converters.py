"""Convert rows of each format that tiercel reads to drafts of rows.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tiercel.config.data import FormatName
from tiercel.data.formats.preferences import without
from tiercel.data.formats.visuals import read_box_images, read_boxes, read_image_number, read_images, read_videos
from tiercel.data.marks import BOX_MARK
from tiercel.data.record_values import given, is_number
from tiercel.data.rows import RowDraft
from tiercel.data.texts import told
from tiercel.data.turns import ROLES, Role, read_content, read_messages
from tiercel.errors import DataError
from tiercel.reward_types import column
from tiercel.types import Message

_SHARE_GPT_ROLES: dict[str, Role] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}

_OPENAI_ROLES: dict[str, Role] = {"system": "system", "developer": "system", **ROLES}
VERL_ANSWER = "reward_model.ground_truth"
QUESTIONS = ("question", "problem", "prompt")  # names of the column with the question, beside an answer
EXPRESSIONS = ("expression", "caption", "sentence", "sent")
SEVERAL = ("sentences", "captions")


def from_tiercel(record: Mapping[str, Any]) -> RowDraft:
    """Read tiercel's own rows."""
    boxes = read_boxes(record["boxes"], "boxes") if given(record, "boxes") else ()
    messages = _after_system(record, read_messages(record.get("messages"), "messages"))
    own = {"boxes": boxes, "box_images": read_box_images(record.get("box_images"), "box_images", len(boxes))}
    own |= {"answer": record["answer"]} if given(record, "answer") else {}
    return _draft(record, messages, read=("messages", "system", "answer", "boxes", "box_images"), answers=(), own=own)


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
        raise DataError(f"is {kind!r}, but must be real (pixels) or norm1 (0 to 1)", field="objects.bbox_type")
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
    """Read VLM-R1's rows. The answer is `solution` or `answer`, or else the gpt turn that ends the conversation."""
    _refuse(record, "tools")
    field, last = "conversations", None
    if given(record, field):
        messages, last = _conversation(record[field])
        messages = _after_system(record, messages)
    else:
        field = "problem"
        messages = (Message(role="user", content=read_content(record.get(field), field)),)
    answers = ("solution", "answer")
    draft = _draft(record, messages, field, read=("conversations", "system"), answers=answers, otherwise=last)
    return replace(draft, named={**draft.named, **_named_by_vlm_r1(messages, last)})


def _named_by_vlm_r1(messages: Sequence[Message], last: Any) -> dict[str, Any]:
    """Return what VLM-R1 itself would pass to its rewards for a conversation: the problem, and the answer in tags."""
    asked = next((message.content for message in reversed(messages) if message.role == "user"), "")
    named = {"problem": asked.replace("<image>", ""), "accu_reward_method": "default"}
    if last is not None:
        answer = last.replace("<answer>", "").replace("</answer>", "").strip() if isinstance(last, str) else last
        named["solution"] = f"<answer> {answer} </answer>"
    return named


def from_sharegpt(record: Mapping[str, Any]) -> RowDraft:
    """Read LLaMA-Factory's ShareGPT rows. The answer is `solution` or `answer`, or else the gpt turn that ends the
    conversation."""
    _refuse(record, "audios", "tools", "chosen", "rejected")
    messages, last = _conversation(record.get("conversations"))
    messages = _after_system(record, messages)
    answers = ("solution", "answer")
    return _draft(record, messages, "conversations", read=("conversations", "system"), answers=answers, otherwise=last)


def from_alpaca(record: Mapping[str, Any]) -> RowDraft:
    """Read LLaMA-Factory's Alpaca rows: instruction and input are the last question, output is its answer."""
    _refuse(record, "audios", "tools", "chosen", "rejected")
    asked = [read_content(record[key], key) for key in ("instruction", "input") if record.get(key)]
    turns = [*_system_turn(record), *_history_turns(record.get("history"))]
    turns += [Message(role="user", content="\n".join(asked)), *_answer_turn(record, "output")]
    read = ("instruction", "input", "output", "history", "system")
    return _draft(record, tuple(turns), "instruction", read=read, answers=("solution", "answer", "output"))


def from_openai(record: Mapping[str, Any]) -> RowDraft:
    """Read OpenAI's messages. The pictures of their parts are in `images` by now; the answer is `answer` or
    `solution`."""
    _refuse(record, "tools", "functions")
    messages = _after_system(record, read_messages(record.get("messages"), "messages", roles=_OPENAI_ROLES))
    read, answers = ("messages", "system", "answer"), ("answer", "solution")
    return _draft(_without_videos(record), messages, read=read, answers=answers)


def from_refcoco(record: Mapping[str, Any]) -> RowDraft:
    """Read a referring expression and its box in COCO's [x, y, width, height]. The user turn is the expression; the
    assistant turn and the answer are the box as [x1, y1, x2, y2]."""
    record = _without_videos(record)
    corner = record.get("bbox")
    if not isinstance(corner, list) or len(corner) != 4 or not all(is_number(number) for number in corner):
        raise DataError("must be 4 numbers [x, y, width, height]", field="bbox")
    x, y, width, height = corner
    boxes = read_boxes([[x, y, x + width, y + height]], "bbox")
    key = next((key for key in EXPRESSIONS if given(record, key)), "expression")
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
    """Read TRL's rows: a prompt, and its completion if there is one, each as text or as a list of turns. A completion
    without a prompt is a whole conversation, and so is one that begins with the turns of the prompt. In RLHF-V's rows
    the prompt is `question`; in rows that have a prompt, `question` is an ordinary column."""
    _refuse(record, "tools", "chosen", "rejected")
    asked = "prompt" if given(record, "prompt") else "question"
    before, after = _side(record, asked, "user"), _side(record, "completion", "assistant")
    if before and after and after[0].role != "assistant":
        if [each.content for each in after[: len(before)]] != [each.content for each in before]:
            raise DataError(told("answer to another question", after[0].role, asked), field=asked)
        before = ()
    turns, read = (*before, *after) or read_messages([], "prompt"), ("prompt", asked, "completion")
    return _draft(record, turns, "prompt", read=read, answers=("answer", "solution"))


def _side(record: Mapping[str, Any], key: str, role: Role) -> tuple[Message, ...]:
    """Read a prompt or a completion: turns, or the text of one."""
    value = record.get(key)
    if isinstance(value, list):
        return tuple(read_messages(value, key)) if value else ()
    return () if value is None else (Message(role=role, content=read_content(value, key)),)


def from_qa(record: Mapping[str, Any], questions: Sequence[str] = QUESTIONS) -> RowDraft:
    """Read a question, as text or as turns, from the first of `questions` that the row has, and its answer. If the row
    has no assistant turn after the question and the answer is text, a number or a list of numbers, the answer also
    becomes the assistant turn."""
    _refuse(record, "tools", "chosen", "rejected")
    field = next((key for key in questions if given(record, key)), questions[0])
    asked = record.get(field)
    turns = list(asked) if isinstance(asked, list) else [{"role": "user", "content": read_content(asked, field)}]
    answers = ("answer", "solution")
    draft = _draft(record, read_messages(turns, field), field, read=(field,), answers=answers)
    if draft.messages[-1].role != "user" or draft.answer is None:
        return draft
    key = next((key for key in answers if given(record, key)), None)
    text = _answer_text(draft.answer if key is None else record[key])  # with the thought before it
    answered = () if text is None else (Message(role="assistant", content=text),)
    return replace(draft, messages=(*draft.messages, *answered))


def from_verl(record: Mapping[str, Any]) -> RowDraft:
    """Read verl's rows. `prompt` comes before a column with the raw question that its preprocessing may have left."""
    return from_qa(record, ("prompt", *(key for key in QUESTIONS if key != "prompt")))


def _answer_text(answer: Any) -> str | None:
    """Write an answer as a turn; None if it is not a single answer, such as a list of texts that are all accepted."""
    if isinstance(answer, str):
        return answer
    numbers = answer if isinstance(answer, list) else [answer]
    if not numbers or not all(is_number(number) for number in numbers):
        return None
    # If a column of whole numbers in Parquet has a missing value, its numbers are read as floats.
    is_whole = isinstance(answer, float) and answer.is_integer()
    return json.dumps(int(answer) if is_whole else answer)


def _draft(
    record: Mapping[str, Any],
    messages: tuple[Message, ...],
    field: str = "messages",
    *,
    read: tuple[str, ...],
    answers: tuple[str, ...],
    otherwise: Any = None,
    own: Mapping[str, Any] | None = None,
) -> RowDraft:
    """Make a draft of turns that were read from the columns `read`, with the record's images and videos. The right
    answer is in the first column of `answers` that the row has, or else where verl has it, or else `otherwise`. If it
    was read from the column `answer`, that is not one of the row's columns; if it was cleaned, rewards of other
    frameworks get it as it was. `own` are fields that the format reads itself."""
    key = next((key for key in answers if given(record, key)), None)
    found = column(record, VERL_ANSWER) if key is None else record[key]
    answer = clean_answer(otherwise if found is None else found)
    own = own or {}
    is_changed = key in ("answer", None) and found is not None and answer != found and "answer" not in own
    fields: dict[str, Any] = {
        "messages": messages,
        "messages_field": field,
        "images": read_images(record),
        "videos": read_videos(record),
        "answer": answer,
        "answer_image": read_image_number(record.get("answer_image"), "answer_image"),
        "columns": _columns(record, *read, *(["answer"] if key == "answer" else [])),
        "named": {"answer": found} if is_changed else {},
    }
    return RowDraft(**fields | dict(own))


def clean_answer(value: Any) -> Any:
    """Remove the <answer> tags of an answer, and convert text that is a JSON list of numbers to that list, as of a box
    or a point. "[7]" is neither, and stays text."""
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
    return numbers if len(numbers) != 1 and all(is_number(number) for number in numbers) else text


def _columns(record: Mapping[str, Any], *read: str) -> dict[str, Any]:
    """Return a record without its id, its images and videos, and the keys that its format has read."""
    taken = {"id", "images", "image", "videos", "video", "min_pixels", "max_pixels", *read}
    return {key: value for key, value in record.items() if key not in taken}


def _without_videos(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Copy a record of a format that does not support videos, without the keys for them. Raises DataError if it has
    one."""
    for key in ("videos", "video"):
        if record.get(key):
            raise DataError("this format does not support videos; use tiercel's own row format", field=key)
    return without(record, "videos", "video")


def _refuse(record: Mapping[str, Any], *keys: str) -> None:
    for key in keys:
        if record.get(key) and key in ("chosen", "rejected"):
            raise DataError("belongs to a preference pair; use `tiercel dpo`, which learns from pairs", field=key)
        if record.get(key) and record[key] not in ("[]", "{}", "null"):  # as tables write that there is none
            raise DataError(f"tiercel trains on images, videos and text; it does not read rows with `{key}`", field=key)


def _swift_messages(record: Mapping[str, Any]) -> tuple[Message, ...]:
    if given(record, "messages"):
        return _after_system(record, read_messages(record["messages"], "messages"))
    if not given(record, "query"):
        raise DataError("is missing; a row needs `messages`, or `query` and `response`", field="messages")
    turns = [*_system_turn(record), *_history_turns(record.get("history"))]
    turns += [Message(role="user", content=read_content(record["query"], "query")), *_answer_turn(record, "response")]
    return tuple(turns)


def _after_system(record: Mapping[str, Any], messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Put the turn of a system column before the others. Raises DataError if these have a system turn too."""
    system = _system_turn(record)
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


def _system_turn(record: Mapping[str, Any]) -> tuple[Message, ...]:
    """Read the turn of a system column; tables write an empty text if a row has none."""
    value = record.get("system")
    return () if value in (None, "") else (Message(role="system", content=read_content(value, "system")),)


def _objects(value: Any) -> Any:
    """Parse objects that are written as JSON text, which keeps their types in tables."""
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
    """Read the turns of human and gpt, with `from` and `value` or, as MiniCPM-V and Unsloth write them, with `role` and
    `content`. VLM-R1 allows the value of a turn to be a number or a list. Return them, and the original value of the
    gpt turn that ends the conversation."""
    last = None
    turns = list(value) if isinstance(value, list) else value
    first = turns[0] if isinstance(turns, list) and turns else None
    has_roles = isinstance(first, Mapping) and given(first, "role") and not given(first, "from")
    role_key, content_key = ("role", "content") if has_roles else ("from", "value")
    for number, turn in enumerate(turns if isinstance(turns, list) else []):
        last = None
        if isinstance(turn, Mapping) and turn.get(role_key) in ("gpt", "assistant"):
            last = turn.get(content_key)
            if is_number(last) or (isinstance(last, list) and last and all(is_number(item) for item in last)):
                turns[number] = {**turn, content_key: json.dumps(last)}
    roles = _SHARE_GPT_ROLES
    return read_messages(turns, "conversations", role_key=role_key, content_key=content_key, roles=roles), last


CONVERTERS: dict[FormatName, Callable[[Mapping[str, Any]], RowDraft]] = {
    "tiercel": from_tiercel,
    "swift": from_swift,
    "vlm_r1": from_vlm_r1,
    "sharegpt": from_sharegpt,
    "alpaca": from_alpaca,
    "openai": from_openai,
    "trl": from_trl,
    "rlhf_v": from_trl,
    "qa": from_qa,
    "verl": from_verl,
    "refcoco": from_refcoco,
}
