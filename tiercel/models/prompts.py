"""Encode rows as token ids: prompts to sample after, and conversations with the tokens that are scored. Shape suffixes:
docs/shapes.md."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from tiercel.errors import DataError
from tiercel.models.families.base import Family
from tiercel.models.rendering import image_markers, render, require_whole, token_ids, with_boxes, with_system
from tiercel.types import VISUAL_MARK, EncodedConversation, EncodedImage, EncodedPrompt, ImagePlan, Message, Row

EMPTY_THOUGHT = re.compile(r"(?:<(\w+)>\s*</\1>|<\|(\w+)>\w*\s*<\2\|>)\s*")


def prompt_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages up to the last user turn, after which GRPO and evaluation sample. Raises DataError if there
    is no user turn."""
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=None)
    if last_user is None:
        raise DataError("there is no user turn to sample after", field="messages")
    return tuple(messages[: last_user + 1])


def prompt_length(family: Family, row: Row, plans: Sequence[ImagePlan], system: str | None) -> int:
    """Count the tokens of the row's prompt. `plans` come from the images' headers. Raises DataError if the row cannot
    be encoded."""
    family = family.for_row(row)
    messages = prompt_messages(with_system(with_boxes(row, plans, family), system))
    text = render(family, messages, True)
    require_whole(text, messages, with_answers=False)
    return len(token_ids(family, text, plans[: _image_count(messages)]))


def conversation_length(family: Family, row: Row, plans: Sequence[ImagePlan], system: str | None) -> int:
    """Count the tokens of the whole conversation. `plans` come from the images' headers. Raises DataError if the row
    cannot be encoded."""
    messages = _to_last_trained(with_system(with_boxes(row, plans, family), system))
    text = render(family, messages, False)
    require_whole(text, messages, with_answers=True)
    _require_one_token(family)
    whole = text
    for number, message in enumerate(messages):
        if message.role == "assistant":
            _, whole = require_growing(family, messages, number, text)
    ids = token_ids(family, whole, plans[: _image_count(messages)])
    if family.turn_end is not None and family.turn_end.token is None:
        return len(ids) + 1  # the end token, which the template does not write
    end = family.checkpoint.end_token_ids[0]
    while ids and ids[-1] != end and end in ids:  # text after the last turn is not trained on
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
    """Encode the prompt to sample after. It is never truncated: raises DataError if it is longer than
    `max_prompt_tokens`."""
    family = family.for_row(row)
    plans = [image.plan for image in images]
    messages = prompt_messages(with_system(with_boxes(row, plans, family), system))
    images = tuple(images[: _image_count(messages)])
    plans = plans[: len(images)]
    text = render(family, messages, add_generation_prompt=True)
    require_whole(text, messages, with_answers=False)
    token_ids_P = _checked(token_ids(family, text, plans), max_prompt_tokens)
    return EncodedPrompt(
        row=row,
        index=index,
        text=text,
        token_ids_P=token_ids_P,
        positions_DP=family.positions(token_ids_P, plans),
        images=images,
        messages=messages,
        picture_spans=family.picture_spans(token_ids_P),
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
    """Encode a conversation for SFT, up to the last assistant turn that is trained on. The tokens of the trained turns,
    including their end tokens, are scored.

    Text before and after each turn is tokenised separately, so that a turn has the tokens that sampling would produce.
    Raises DataError if the template changes earlier turns, or if the conversation has no assistant turn or is longer
    than `max_prompt_tokens`.
    """
    plans = [image.plan for image in images]
    messages = with_system(with_boxes(row, plans, family), system)
    if _image_count(messages) != len(images):
        raise DataError(
            f"the number of images is {len(images)}, but the number of places for them is {_image_count(messages)}",
            field="images",
        )
    messages = _to_last_trained(messages)
    images = images[: _image_count(messages)]
    found = _TurnTokens(family, plans, render(family, messages, add_generation_prompt=False))
    for number, message in enumerate(messages):
        if message.role == "assistant":
            found.add_turn(messages, number)
    require_whole(found.text, messages, with_answers=True)
    if not found.prompt_text:
        raise DataError("there is no assistant turn to train on", field="messages")
    if found.image_count != len(images):
        raise DataError(
            f"the number of images is {len(images)}, but the number of places for them is {found.image_count}",
            field="images",
        )
    found.drop_unscored_end()
    token_ids_T = _checked(found.ids, max_prompt_tokens)
    positions_DT = family.positions(token_ids_T, plans)
    start = found.prompt_length
    prompt = EncodedPrompt(
        row=row,
        index=index,
        text=found.prompt_text,
        token_ids_P=token_ids_T[:start],
        positions_DP=positions_DT[:, :start],
        images=tuple(images),
        picture_spans=family.picture_spans(token_ids_T[:start]),
    )
    return EncodedConversation(
        prompt=prompt,
        picture_spans=family.picture_spans(token_ids_T[start:]),
        token_ids_L=token_ids_T[start:],
        positions_DL=positions_DT[:, start:],
        is_scored_L=torch.tensor(found.is_scored[start:]),
    )


def require_growing(family: Family, messages: Sequence[Message], number: int, text: str) -> tuple[str, str]:
    """Return the text before the assistant turn at `number`, and the text up to its end. `text` is that of the whole
    conversation. Raises DataError unless `text` begins with the second text, and that with the first. An empty thought
    that the template writes before each sampled answer, but into no conversation, as those of Gemma 4's larger models
    do, stays before the last answer, and only there: later turns would not see it."""
    before = render(family, messages[:number], add_generation_prompt=True)
    is_last = number + 1 == len(messages)
    after = text if is_last else render(family, messages[: number + 1], add_generation_prompt=False)
    is_whole = text.startswith(after)
    if not after.startswith(before):
        shared = next(
            (i for i, (one, other) in enumerate(zip(before, after, strict=False)) if one != other), len(after)
        )
        if EMPTY_THOUGHT.fullmatch(before, shared):
            before, after = (before, before + after[shared:]) if is_last else (before[:shared], after)
    if not (is_whole and after.startswith(before)):
        raise DataError(
            "the chat template changes earlier turns when later ones follow; set data.template to one that does not, "
            "or, if the template has this variable, data.template_arguments: {preserve_thinking: true}",
            field="messages",
        )
    return before, after


class _TurnTokens:
    """A collector of a conversation's tokens, assistant turn by assistant turn, and of which tokens are scored."""

    def __init__(self, family: Family, plans: Sequence[ImagePlan], text: str):
        self.family = family
        self.plans = plans
        self.text = text  # of the whole conversation
        self.ids: list[int] = []
        self.is_scored: list[bool] = []
        self.prompt_text = ""  # all text before the first assistant turn that is trained on
        self.prompt_length = 0  # in tokens
        self.image_count = 0
        self._text_length = 0

    def add_turn(self, messages: Sequence[Message], number: int) -> None:
        """Add the text before the assistant turn at `number`, the turn, and the template's text after it."""
        before, after = require_growing(self.family, messages, number, self.text)
        self._add(before[self._text_length :], is_scored=False)
        is_trained = messages[number].is_trained
        if is_trained and not self.prompt_text:
            self.prompt_text, self.prompt_length = before, len(self.ids)
        turn, end, rest = _split_turn(self.family, after[len(before) :])
        self._add(turn, is_scored=is_trained)
        if end is None and number == len(messages) - 1:  # nothing follows, and the policy must learn to stop
            end = self.family.checkpoint.end_token_ids[0]
        if end is not None:
            self.ids.append(end)
            self.is_scored.append(is_trained)
        self._add(rest, is_scored=False)
        self._text_length = len(after)

    def _add(self, text: str, *, is_scored: bool) -> None:
        count = len(image_markers(self.family).findall(text))
        plans = self.plans[self.image_count : self.image_count + count]
        ids = token_ids(self.family, text, plans, self.ids)
        self.image_count += count
        self.ids += ids
        self.is_scored += [is_scored] * len(ids)

    def drop_unscored_end(self) -> None:
        """Remove the tokens that the template writes after the last turn, because no scored token follows them."""
        while not self.is_scored[-1]:
            self.ids.pop()
            self.is_scored.pop()


def completion_positions(positions_DP: Tensor, length: int) -> Tensor:
    """Compute the positions (D, length) of text after a prompt. They begin at the prompt's largest position plus 1."""
    return (positions_DP.max() + 1 + torch.arange(length)).expand(positions_DP.shape[0], -1)


def _split_turn(family: Family, text: str) -> tuple[str, int | None, str]:
    """Split an assistant turn into its text, the id of its end token (None if the template writes no end), and the
    template's text after it. Raises DataError if the template writes an end that is not a token."""
    _require_one_token(family)
    for end in family.checkpoint.end_token_ids:
        token = family.tokenizer.convert_ids_to_tokens(end)
        turn, found, rest = text.rpartition(token)
        if found:
            return turn, end, rest
    return text, None, ""


def _require_one_token(family: Family) -> None:
    """Raise DataError if the template ends a turn with plain text, at which no engine could stop."""
    end = family.turn_end
    if end is not None and end.token is None and (text := end.text.strip()):
        raise DataError(
            f"the chat template ends an assistant's turn with {text!r}, which is not a token of this tokenizer, so "
            "generation could not stop there; set data.template to one that ends a turn with a token of the "
            f"tokenizer, such as {family.tokenizer.convert_ids_to_tokens(family.checkpoint.end_token_ids[0])}",
            field="messages",
        )


def _to_last_trained(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Drop the turns after the last one that is trained on."""
    trained = [number for number, message in enumerate(messages) if message.role == "assistant" and message.is_trained]
    return messages[: trained[-1] + 1] if trained else messages


def _image_count(messages: Sequence[Message]) -> int:
    return sum(len(VISUAL_MARK.findall(message.content)) for message in messages)


def _checked(ids: list[int], max_prompt_tokens: int) -> Tensor:
    if len(ids) > max_prompt_tokens:
        raise DataError(
            f"has {len(ids)} tokens, more than data.max_prompt_tokens = {max_prompt_tokens}; raise it, or lower "
            "model.max_pixels",
            field="messages",
        )
    return torch.tensor(ids, dtype=torch.int64)
