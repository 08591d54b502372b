"""The answers of an environment or a tool, as text that is safe to render and pictures that are not decoded yet."""

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from warnings import warn

from tiercel.data.media.images import resolve
from tiercel.environments.processes import EnvironmentFailure
from tiercel.models.families.base import Family
from tiercel.models.prompts import prompt_messages
from tiercel.reliability.redaction import redact_answer
from tiercel.rewards.runtime.wire import NotJson, as_line
from tiercel.sandbox.process import FOREIGN_REPLY
from tiercel.types import ImageSource, Row

_ROW_MARKS = ("<image>", "<video>", "<bbox>")


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentAnswer:
    """An answer. As in a Message, `<image>` in `content` marks each picture."""

    content: str
    pictures: tuple[ImageSource, ...] = ()
    is_done: bool = False  # the environment has ended the trajectory


def harmless(family: Family) -> Callable[[str], str]:
    """Return a function that removes the meaning of marks and special tokens from a text of the user's code. It puts a
    space after their first character, so that no token of the text is a placeholder or an end. Secrets are removed
    first, because parts of one may be in two parts of an answer."""
    tokenizer = family.tokenizer
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    placeholders = tokenizer.convert_ids_to_tokens(list(family.placeholder_ids))
    markers = (family.image_marker, family.video_marker, *family.around_image)
    texts = {*_ROW_MARKS, *special, *tokenizer.all_special_tokens, *placeholders, *markers}
    longest_first = sorted((text for text in texts if text and len(text.strip()) > 1), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)))

    def written(text: str) -> str:
        text = text.encode("utf-8", "replace").decode()  # halves of surrogate pairs cannot be tokenised
        return pattern.sub(lambda found: f"{found[0][0]} {found[0][1:]}", redact_answer(text))

    return written


def answer_of(reply: Mapping[str, Any], written: Callable[[str], str]) -> EnvironmentAnswer | None:
    """Read the reply of a process; None if it has no answer. Raises EnvironmentFailure if it is not one of ours."""
    try:
        if reply["parts"] is None:
            return None
        pictures: list[ImageSource] = []
        texts = [""]  # before, between and after the pictures
        for part in reply["parts"]:
            if "image" in part:
                pictures.append(ImageSource(data=base64.b64decode(part["image"], validate=True)))
                texts.append("")
            else:
                texts[-1] += part["text"]
        content = "<image>".join(map(written, texts))
        return EnvironmentAnswer(content=content, pictures=tuple(pictures), is_done=reply["is_done"])
    except (KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise EnvironmentFailure(FOREIGN_REPLY) from error


def reset_fields(row: Row) -> dict[str, Any]:
    """Return what `reset` gets from a row. Raises EnvironmentFailure if a column cannot be written as JSON, and
    DataError if a picture is missing."""
    columns = {**row.columns, "answer": row.answer}
    prompt = next(message.content for message in reversed(row.messages) if message.role == "user")
    files = [None if each.path is None else str(resolve(each.path, row.image_roots)) for each in row.images]
    fields = {**columns, "id": row.id, "prompt": prompt, "images": files}
    try:
        as_line(fields, row.id, columns)
    except NotJson as error:
        raise EnvironmentFailure(str(error)) from error
    return fields


def with_observation(row: Row, observation: EnvironmentAnswer) -> Row:
    """Return the row's prompt with the answer of `reset` at the end of its last user turn."""
    *before, last = prompt_messages(row.messages)
    messages = (*before, replace(last, content=last.content + observation.content))
    own = sum(message.content.count("<image>") for message in (*before, last))
    return replace(row, messages=messages, images=(*row.images[:own], *observation.pictures))


def __getattr__(name: str) -> Any:
    """Give the class by its old name, for one release."""
    if name != "Answer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warn(f"{__name__}.Answer is now EnvironmentAnswer", DeprecationWarning, stacklevel=2)
    return EnvironmentAnswer
