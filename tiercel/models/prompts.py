"""Rows to token ids: chat template, image placeholders, turns.

Shape suffixes: P prompt tokens, C tokens after the prompt, D position dimensions.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from jinja2 import TemplateError
from torch import Tensor

from tiercel.errors import DataError
from tiercel.geometry import from_original
from tiercel.models.family import Family
from tiercel.types import VISUAL_MARK, EncodedConversation, EncodedImage, EncodedPrompt, ImagePlan, Message, Row

# A template is a program: it divides, looks up and calls what it likes.
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
    """The messages, opened by the recipe's system message where they have none of their own."""
    if system is None or (messages and messages[0].role == "system"):
        return tuple(messages)
    return Message(role="system", content=system), *messages


def with_boxes(row: Row, plans: Sequence[ImagePlan], family: Family) -> tuple[Message, ...]:
    """The row's messages, each <bbox> mark written in the family's coordinate space."""
    if not row.boxes:
        return row.messages
    boxes = iter(zip(row.boxes, row.box_images, strict=True))

    def written(content: str) -> str:
        pieces = content.split("<bbox>")
        text = pieces[0]
        for piece in pieces[1:]:
            box, image = next(boxes)
            plan = plans[image]
            mapped = from_original(box, family.coordinate_space, plan.original_size, plan.processed_size)
            digits = 3 if family.coordinate_space == "unit" else 0
            text += "[" + ", ".join(f"{value:.{digits}f}" for value in mapped) + "]" + piece
        return text

    return tuple(replace(message, content=written(message.content)) for message in row.messages)


def render(family: Family, messages: Sequence[Message], add_generation_prompt: bool) -> str:
    """The chat template's text; each image is `family.image_marker`. Raises DataError where the template fails."""
    conversation = []
    for message in messages:
        if family.video_marker is None and "<video>" in message.content:
            raise DataError(f"{family.name} reads no videos here; the families of Qwen do", field="messages")
        texts = VISUAL_MARK.split(message.content)
        parts = [{"type": "text", "text": texts[0]}] if texts[0] else []
        for mark, text in zip(VISUAL_MARK.findall(message.content), texts[1:], strict=True):
            parts.append({"type": mark.strip("<>")})
            if text:
                parts.append({"type": "text", "text": text})
        conversation.append({"role": message.role, "content": parts})
    try:
        return family.tokenizer.apply_chat_template(
            conversation,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            chat_template=family.checkpoint.chat_template,
        )
    except TEMPLATE_FAULTS as error:
        raise DataError(f"the chat template refuses this conversation: {error}", field="messages") from error


def token_ids(family: Family, text: str, plans: Sequence[ImagePlan]) -> list[int]:
    """Ids of rendered text with every image marker replaced by its image's tokens. Raises DataError."""
    pieces = _markers(family).split(text)
    if len(pieces) - 1 != len(plans):
        raise DataError(
            f"the rendered text has {len(pieces) - 1} places for {len(plans)} images and videos; does the text itself "
            f"contain {family.image_marker}?",
            field="messages",
        )
    ids: list[int] = []
    for number, piece in enumerate(pieces):
        if piece:
            piece_ids = family.tokenizer(piece, add_special_tokens=False)["input_ids"]
            if forbidden := set(piece_ids) & set(family.placeholder_ids):
                names = family.tokenizer.convert_ids_to_tokens(sorted(forbidden))
                raise DataError(f"the text contains the model's own vision token {names}", field="messages")
            ids += piece_ids
        if number < len(plans):
            ids += family.image_token_ids(plans[number])
    return ids


def _markers(family: Family) -> re.Pattern[str]:
    """What the chat template writes where an image or a video goes."""
    return re.compile("|".join(map(re.escape, filter(None, (family.image_marker, family.video_marker)))))


def prompt_messages(row: Row, messages: Sequence[Message]) -> tuple[Message, ...]:
    """Everything up to the last user turn: what GRPO and evaluation sample after."""
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=None)
    if last_user is None:
        raise DataError("no user turn to sample after", field="messages")
    return tuple(messages[: last_user + 1])


def prompt_length(family: Family, row: Row, plans: Sequence[ImagePlan], system: str | None) -> int:
    """Tokens of the row's prompt, from the image headers alone."""
    messages = prompt_messages(row, with_system(with_boxes(row, plans, family), system))
    return len(token_ids(family, render(family, messages, True), plans[: _image_count(messages)]))


def conversation_length(family: Family, row: Row, plans: Sequence[ImagePlan], system: str | None) -> int:
    """Tokens of the whole conversation, from the image headers alone."""
    messages = _to_last_learnt(with_system(with_boxes(row, plans, family), system))
    ids = token_ids(family, render(family, messages, False), plans[: _image_count(messages)])
    ends = set(family.checkpoint.end_token_ids)
    while ids and ids[-1] not in ends and not ends.isdisjoint(ids):  # what follows the last turn is not trained on
        ids.pop()
    return len(ids)


def encode_prompt(
    family: Family,
    row: Row,
    index: int,
    images: Sequence[EncodedImage],
    *,
    system: str | None,
    max_prompt_tokens: int,
) -> EncodedPrompt:
    """The prompt to sample after. It is whole or refused with its length (DataError), never cut."""
    plans = [image.plan for image in images]
    messages = prompt_messages(row, with_system(with_boxes(row, plans, family), system))
    images = tuple(images[: _image_count(messages)])
    plans = plans[: len(images)]
    text = render(family, messages, add_generation_prompt=True)
    token_ids_P = _checked(token_ids(family, text, plans), max_prompt_tokens)
    return EncodedPrompt(
        row=row,
        index=index,
        text=text,
        token_ids_P=token_ids_P,
        positions_DP=family.positions(token_ids_P, plans),
        images=images,
        messages=messages,
    )


def encode_conversation(
    family: Family,
    row: Row,
    index: int,
    images: Sequence[EncodedImage],
    *,
    system: str | None,
    max_prompt_tokens: int,
) -> EncodedConversation:
    """The conversation for SFT, as far as its last turn that is learnt: such turns, end tokens included, are scored.

    Text before and after each turn is tokenised apart, so that a turn's tokens are those that sampling would
    have met. A template that rewrites earlier turns is refused.
    """
    plans = [image.plan for image in images]
    messages = with_system(with_boxes(row, plans, family), system)
    if _image_count(messages) != len(images):
        raise DataError(f"{len(images)} images for {_image_count(messages)} image places", field="images")
    messages = _to_last_learnt(messages)
    images = images[: _image_count(messages)]
    ids: list[int] = []
    scored: list[bool] = []
    prompt_length = text_length = image_count = 0
    prompt_text = ""

    def append(text: str, is_scored: bool) -> None:
        nonlocal image_count
        count = len(_markers(family).findall(text))
        piece = token_ids(family, text, plans[image_count : image_count + count])
        image_count += count
        ids.extend(piece)
        scored.extend([is_scored] * len(piece))

    full_text = render(family, messages, add_generation_prompt=False)
    for number, message in enumerate(messages):
        if message.role != "assistant":
            continue
        before = render(family, messages[:number], add_generation_prompt=True)
        after = render(family, messages[: number + 1], add_generation_prompt=False)
        if not (full_text.startswith(after) and after.startswith(before)):
            raise DataError(
                "the chat template changes earlier turns when later ones follow; give data.template one that does not",
                field="messages",
            )
        append(before[text_length:], False)
        if not prompt_text:
            prompt_text, prompt_length = before, len(ids)
        turn, end, rest = _split_turn(family, after[len(before) :])
        append(turn, message.is_trained)
        ids.append(end)
        scored.append(message.is_trained)
        append(rest, False)
        text_length = len(after)
    if not prompt_text:
        raise DataError("no assistant turn to train on", field="messages")
    if image_count != len(images):
        raise DataError(f"{len(images)} images for {image_count} image places", field="images")
    while not scored[-1]:  # what a template writes after the last turn predicts nothing
        ids.pop()
        scored.pop()
    token_ids_T = _checked(ids, max_prompt_tokens)
    positions_DT = family.positions(token_ids_T, plans)
    prompt = EncodedPrompt(
        row=row,
        index=index,
        text=prompt_text,
        token_ids_P=token_ids_T[:prompt_length],
        positions_DP=positions_DT[:, :prompt_length],
        images=tuple(images),
    )
    return EncodedConversation(
        prompt=prompt,
        token_ids_L=token_ids_T[prompt_length:],
        positions_DL=positions_DT[:, prompt_length:],
        is_scored_L=torch.tensor(scored[prompt_length:]),
    )


def completion_positions(positions_DP: Tensor, length: int) -> Tensor:
    """Positions (D, length) of text that follows a prompt: on from one past its largest position."""
    return (positions_DP.max() + 1 + torch.arange(length)).expand(positions_DP.shape[0], -1)


def _split_turn(family: Family, text: str) -> tuple[str, int, str]:
    """An assistant turn's text, its end token's id, and what the template writes after it."""
    for end in family.checkpoint.end_token_ids:
        token = family.tokenizer.convert_ids_to_tokens(end)
        turn, found, rest = text.rpartition(token)
        if found:
            return turn, end, rest
    return text, family.checkpoint.end_token_ids[0], ""


def _to_last_learnt(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """What follows the last turn that is learnt teaches nothing."""
    learnt = [number for number, message in enumerate(messages) if message.role == "assistant" and message.is_trained]
    return messages[: learnt[-1] + 1] if learnt else messages


def _image_count(messages: Sequence[Message]) -> int:
    return sum(len(VISUAL_MARK.findall(message.content)) for message in messages)


def _checked(ids: list[int], max_prompt_tokens: int) -> Tensor:
    if len(ids) > max_prompt_tokens:
        raise DataError(
            f"{len(ids)} tokens are more than data.max_prompt_tokens = {max_prompt_tokens}; raise it, or lower "
            "model.max_pixels",
            field="messages",
        )
    return torch.tensor(ids, dtype=torch.int64)
