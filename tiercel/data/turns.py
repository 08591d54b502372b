"""Read a row's turns: lists of messages, their parts, and lists that a column has as text."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from tiercel.data.record_values import brief_value, given, is_filled, is_truth, wrong_value
from tiercel.data.texts import told
from tiercel.errors import DataError
from tiercel.message_text import brief
from tiercel.types import Message

Purpose = Literal["sft", "pairs", "labels", "grpo"]
Role = Literal["system", "user", "assistant"]
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
ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}


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
            raise DataError(told("turn that is no object", brief_value(turn), role_key, content_key), field=place)
        # A key such as "tool_calls" changes what the turn means, so it must not be ignored.
        if not turn.keys() <= known and (
            unknown := sorted(key for key in turn if key not in known and is_filled(turn[key]))
        ):
            names = brief(", ".join(unknown), 200)
            raise DataError(f"has keys that tiercel does not know: {names}; remove them", field=place)
        role = turn.get(role_key)
        if not isinstance(role, str) or role not in roles:
            raise DataError(
                f"is {brief_value(role)}, but must be one of {', '.join(roles)}", field=f"{place}.{role_key}"
            )
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


def only_last_turn(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Train only on the last assistant turn; on none if the row itself excludes that turn."""
    last = max((number for number, message in enumerate(messages) if message.role == "assistant"), default=None)
    return tuple(
        replace(message, is_trained=False) if message.role == "assistant" and number != last else message
        for number, message in enumerate(messages)
    )


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


def answer_start(messages: Sequence[Message]) -> int:
    """Return the place after the last user turn; 0 if there is none."""
    return max((number + 1 for number, message in enumerate(messages) if message.role == "user"), default=0)
