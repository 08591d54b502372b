"""Render messages with the chat template, and tokenise the text with the tokens of its images."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError

from tiercel.errors import DataError
from tiercel.geometry import clipped, from_original, misfit
from tiercel.message_text import brief
from tiercel.models.families.base import Family
from tiercel.models.turn_texts import require_plain_texts
from tiercel.types import VISUAL_MARK, ImagePlan, Message, Row

PRINTED_PART = repr({"type": "text"})[:-1]  # how Python prints a part of a turn
NOTHING = r"(?!)"  # an expression that no text matches
THOUGHT = re.compile(r"\s*<think>(.*?)</think>\n*", re.DOTALL)
THOUGHT_FIELD = "reasoning_content"  # where many templates look for it
# A template is a program, which can fail in any of these ways.
TEMPLATE_FAULTS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


def with_system(messages: Sequence[Message], system: str | None) -> tuple[Message, ...]:
    """Put the recipe's system message before the messages if they have none."""
    if system is None or (messages and messages[0].role == "system"):
        return tuple(messages)
    return Message(role="system", content=system), *messages


def with_boxes(row: Row, plans: Sequence[ImagePlan], family: Family) -> tuple[Message, ...]:
    """Return the row's messages with each <bbox> mark replaced by its box in the family's coordinate space. Raises
    DataError if they contain what only the chat template may write, or marks of other frameworks."""
    require_plain_texts(family, row.messages)
    if not row.boxes:
        return row.messages
    space = family.coordinate_space
    if space is None:
        raise DataError(f"{family.name} does not say how it writes boxes; set data.coordinates", field="boxes")
    boxes = iter(zip(row.boxes, row.box_images, strict=True))

    def written(content: str) -> str:
        pieces = content.split("<bbox>")
        text = pieces[0]
        for piece in pieces[1:]:
            box, image = next(boxes)
            plan = plans[image]
            if problem := misfit(box, "pixels", plan.original_size):
                raise DataError(f"[{', '.join(f'{side:g}' for side in box)}] {problem}", field="boxes")
            inside = clipped(box, plan.original_size)  # it already is, except for rounding
            mapped = from_original(inside, space, plan.original_size, plan.processed_size)
            digits = 3 if space == "unit" else 0
            text += "[" + ", ".join(f"{value:.{digits}f}" for value in mapped) + "]" + piece
        return text

    return tuple(replace(message, content=written(message.content)) for message in row.messages)


def render(family: Family, messages: Sequence[Message], add_generation_prompt: bool) -> str:
    """Render messages with the chat template, which writes each image as `family.image_marker`. Raises DataError if the
    template fails."""
    return apply_template(family, template_messages(family, messages), add_generation_prompt)


def template_messages(family: Family, messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Convert messages to the form that chat templates expect. Raises DataError for pictures that the family does not
    read."""
    conversation: list[dict[str, Any]] = []
    for message in messages:
        named = {} if message.tool is None else {"name": message.tool}
        if message.role == "assistant" and THOUGHT_FIELD in family.checkpoint.chat_template:
            message, thought = _without_thought(message)
            named |= {} if thought is None else {THOUGHT_FIELD: thought}
        if family.image_marker is None:  # templates of text-only models expect text, not a list of parts
            if VISUAL_MARK.search(message.content):
                raise DataError(
                    f"{family.checkpoint.path} is a text-only model and does not read pictures; remove the mark",
                    field="messages",
                )
            conversation.append({"role": message.role, "content": message.content, **named})
            continue
        if family.video_marker is None and "<video>" in message.content:
            raise DataError(f"{family.name} does not read videos here; the Qwen families do", field="messages")
        texts = VISUAL_MARK.split(message.content)
        parts = [{"type": "text", "text": texts[0]}] if texts[0] else []
        for mark, text in zip(VISUAL_MARK.findall(message.content), texts[1:], strict=True):
            parts.append({"type": mark.strip("<>")})
            if text:
                parts.append({"type": "text", "text": text})
        conversation.append({"role": message.role, "content": parts, **named})
    return conversation


def _without_thought(message: Message) -> tuple[Message, str | None]:
    """Split a thought off the beginning of a turn. Templates with a field for it may write another, empty thought
    before one in the content, as Qwen3.8's does."""
    found = THOUGHT.match(message.content)
    if found is None:
        return message, None
    return replace(message, content=message.content[found.end() :]), found[1].strip("\n")


def apply_template(family: Family, conversation: Sequence[dict[str, Any]], add_generation_prompt: bool) -> str:
    """Render a conversation with the chat template, which gets the family's tools. Raises DataError if it fails."""
    try:
        text = family.tokenizer.apply_chat_template(
            list(conversation),
            tools=list(family.tools) or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            chat_template=family.checkpoint.chat_template,
        )
    except TEMPLATE_FAULTS as error:
        raise DataError(f"the chat template refuses this conversation: {error}", field="messages") from error
    return family.numbered(text)


def require_whole(text: str, messages: Sequence[Message], *, with_answers: bool) -> None:
    """Raise DataError if a rendered text lacks text of a turn, or contains the list of its parts instead. Assistant
    turns are checked only if they are trained on and `with_answers` is true, because many templates omit the thoughts
    of earlier turns. Whitespace is ignored."""
    if PRINTED_PART in text and not any(PRINTED_PART in message.content for message in messages):
        raise DataError(
            "the chat template prints a turn as a list of parts; set data.template to one that takes content as a list "
            "of text and image parts",
            field="messages",
        )
    squeezed = "".join(text.split())
    for message in messages:
        if message.role == "assistant" and not (with_answers and message.is_trained):
            continue
        for piece in VISUAL_MARK.split(message.content):
            if "".join(piece.split()) not in squeezed:
                lost = brief(piece.strip(), 60)
                raise DataError(
                    f"the chat template drops text from a turn with role {message.role}: {lost!r}; set data.template "
                    "to one that writes all of it",
                    field="messages",
                )


def token_ids(family: Family, text: str, plans: Sequence[ImagePlan], preceding: Sequence[int] = ()) -> list[int]:
    """Tokenise rendered text that follows the tokens `preceding`, replacing each image marker with the tokens of its
    image. Raises DataError if the number of markers differs from the number of plans, or if the text contains one of
    the model's own vision tokens or a token without an embedding."""
    pieces = image_markers(family).split(text)
    if len(pieces) - 1 != len(plans):
        raise DataError(
            f"the rendered text has {len(pieces) - 1} places for {len(plans)} images and videos; does the text itself "
            f"contain {family.image_marker}?",
            field="messages",
        )
    before, after = family.around_image
    vision_ids, vocabulary_size = set(family.placeholder_ids), family.vocabulary_size
    ids: list[int] = []
    for number, piece in enumerate(pieces):
        piece = (after if number else "") + piece + (before if number < len(plans) else "")
        if piece:  # one text at a time, because a tokeniser's threads wait for each other over a few short ones
            piece_ids = _text_ids(family, piece, ids or preceding)
            if forbidden := vision_ids.intersection(piece_ids):
                names = family.tokenizer.convert_ids_to_tokens(sorted(forbidden))
                raise DataError(f"the text contains the model's own vision token {names}", field="messages")
            if (largest := max(piece_ids, default=0)) >= vocabulary_size:
                raise DataError(
                    f"the text has the token {family.tokenizer.convert_ids_to_tokens(largest)!r}, number {largest}, "
                    f"but the model has only {vocabulary_size} embeddings",
                    field="messages",
                )
            ids += piece_ids
        if number < len(plans):
            ids += family.image_token_ids(plans[number])
    return ids


def _text_ids(family: Family, text: str, preceding: Sequence[int]) -> list[int]:
    """Tokenise a text that follows other tokens. If the tokenizer begins every text with a space of its own, the text
    is tokenised behind a line break, or behind the special token before it, which may bring such a space or not."""
    tokenizer, start, anchor = family.tokenizer, "", list[int]()
    if preceding and family.anchor:
        special = tokenizer.added_tokens_decoder.get(preceding[-1])
        start, anchor = ("\n", family.anchor) if special is None else (special.content, [preceding[-1]])
    ids: list[int] = tokenizer(start + text, add_special_tokens=False)["input_ids"]
    if ids[: len(anchor)] == anchor:
        return ids[len(anchor) :]
    whole: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return whole


def image_markers(family: Family) -> re.Pattern[str]:
    """Return a regular expression for the texts that the chat template writes in place of an image or a video."""
    markers = filter(None, (family.image_marker, family.video_marker))
    return re.compile("|".join(map(re.escape, markers)) or NOTHING)
