"""Turns of a chat: the tokens of an answer between two of the policy's turns, and of a turn's end."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal

import torch
from PIL import Image

from tiercel.errors import DataError, ModelError
from tiercel.models.families.base import Family, TurnEnd
from tiercel.models.rendering import apply_template, render, require_whole, template_messages, token_ids
from tiercel.types import EncodedImage, EncodedPrompt, Message, Observation

ASKED = Message(role="user", content="What is it?")
WRITTEN = Message(role="assistant", content="I look.")  # a placeholder for the policy's turn
SHOWN = 40  # tokens or characters of a difference in a message
PICTURE_SIZE = (56, 56)  # of a picture that represents an answer's picture


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """A rendered conversation, cut after the end token of the policy's turn."""

    before: str  # up to and including that end token
    end: str
    after: str  # the answer, up to the point where the policy writes again


def encode_answer(
    family: Family, messages: Sequence[Message], images: Sequence[EncodedImage], shown: int = 0
) -> Observation:
    """Encode messages that follow a turn of the policy, up to the point where it writes again. `<image>` in their
    contents marks each picture; `shown` is the number of pictures before them, for models that number them. Raises
    DataError if the template refuses them, and ModelError if it writes no end after a turn."""
    pieces = _pieces(family, messages, shown)
    end = family.tokenizer.convert_tokens_to_ids(pieces.end)
    after = token_ids(family, pieces.after, [image.plan for image in images], [end])
    return Observation(token_ids_L=torch.tensor([end, *after], dtype=torch.int64), images=tuple(images))


def second_turn(family: Family, prompt: EncodedPrompt) -> EncodedPrompt:
    """Continue a prompt with a turn and an answer, for comparing engines. The answer shows the prompt's first picture
    again if there is one."""
    family = family.for_row(prompt.row)
    shown = [image for image in prompt.images[:1] if image.plan.fps is None]
    before = sum(image.plan.fps is None for image in prompt.images)
    role: Literal["tool", "user"] = "tool" if family.tools else "user"
    tool = family.tools[0]["function"]["name"] if family.tools else None
    answer = Message(role=role, content="<image>" * len(shown) + "It is a seven.", tool=tool)
    written = token_ids(family, WRITTEN.content, (), prompt.token_ids_P.tolist())
    turn = torch.tensor(written)
    token_ids_P = torch.cat([prompt.token_ids_P, turn, encode_answer(family, [answer], shown, before).token_ids_L])
    images = (*prompt.images, *shown)
    return replace(
        prompt,
        token_ids_P=token_ids_P,
        positions_DP=family.positions(token_ids_P, [image.plan for image in images]),
        images=images,
        picture_spans=family.picture_spans(token_ids_P),
    )


def require_joining(family: Family, role: Literal["tool", "user"], *, has_pictures: bool = False) -> None:
    """Raise ModelError if the tokens of turns, joined one after the other, differ from those of the whole conversation,
    or if the template cannot write an answer to the policy. `role` is the answer's."""
    answer = Message(role=role, content="It is a seven.", tool="look" if role == "tool" else None)
    try:
        pieces = _pieces(family, [answer])
        require_whole(pieces.after, [answer], with_answers=False)
        if has_pictures:
            picture = family.encode_image(Image.new("RGB", PICTURE_SIZE))
            encode_answer(family, [replace(answer, content="<image>")], [picture])
    except DataError as error:
        raise ModelError(
            f"{family.checkpoint.path}: its chat template cannot write what comes back to the policy: {error}; set "
            "data.template to a newer one for this model, or to your own"
        ) from error
    asked = render(family, [ASKED], True)
    if not pieces.before.startswith(asked):
        raise _not_joined(family, pieces.before, asked)
    texts = (asked, pieces.before.removeprefix(asked).removesuffix(pieces.end), pieces.end, pieces.after)
    joined: list[int] = []
    for text in texts:
        joined += token_ids(family, text, (), joined)
    whole = token_ids(family, pieces.before + pieces.after, ())
    if joined != whole:
        raise _not_joined(family, *(family.tokenizer.convert_ids_to_tokens(ids) for ids in (whole, joined)))


def _not_joined(family: Family, whole: Sequence[str], joined: Sequence[str]) -> ModelError:
    """Build the error that names the first difference. `whole` and `joined` are both tokens, or both characters."""
    place = next(i for i, (there, here) in enumerate(zip_longest(whole, joined)) if there != here)
    there, here = (list(each[place : place + SHOWN]) for each in (whole, joined))
    return ModelError(
        f"{family.checkpoint.path}: its chat template writes a turn differently when another follows: from position "
        f"{place} on, the whole conversation has {''.join(there)!r}, but the turns one after the other have "
        f"{''.join(here)!r}. A policy would learn from text that it does not see later; set data.template to a "
        "template that leaves earlier turns as they are, or, if the template has this variable, "
        "data.template_arguments: {preserve_thinking: true}"
    )


def _pieces(family: Family, messages: Sequence[Message], shown: int = 0) -> Pieces:
    """Render the messages after a turn that represents the policy's, which follows `shown` pictures."""
    asked = replace(ASKED, content="<image>" * shown + ASKED.content)
    called = [message.tool for message in messages if message.role == "tool"]
    turns = template_messages(family, [asked, replace(WRITTEN, content="") if called else WRITTEN])
    if called:
        # Some templates write an answer only together with the call that it belongs to, and a text of the same turn
        # after it.
        turns[-1]["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in called]
    alone = apply_template(family, turns, False)
    whole = apply_template(family, [*turns, *template_messages(family, messages)], True)
    end, before = _ended(family, alone, whole)
    if not whole.startswith(before):
        raise _not_joined(family, whole, before)
    return Pieces(before=before, end=end, after=whole.removeprefix(before))


def _ended(family: Family, alone: str, whole: str) -> tuple[str, str]:
    """Return the token that ends the policy's turn, and the text up to and including it. If the template writes none,
    it is the token with which the next turn begins, as in GLM-4.6V. Raises ModelError if there is no such token."""
    ends = [family.tokenizer.convert_ids_to_tokens(end) for end in family.checkpoint.end_token_ids]
    if family.turn_end is not None and not family.turn_end.text.strip():
        end = next((end for end in ends if whole.startswith(alone + end)), None)
        before = f"{alone}{end}"
    else:
        last = max(ends, key=alone.rfind)
        end = last if last in alone else None
        before = alone[: alone.rfind(last) + len(last)]
    if end is None:
        raise ModelError(f"{family.checkpoint.path}: its chat template never ends a turn with {' or '.join(ends)}")
    return end, before


def take_turn_end(family: Family) -> None:
    """Find the tokens around turns from the template, and put that which ends one before the others that end a
    completion. If the template refuses a conversation of two turns, the family stays as it is. Raises ModelError if the
    template does not write what the assistant says, or begins the assistant's turn differently from the generation
    prompt."""
    try:
        conversation = render(family, [ASKED, WRITTEN], False)
        asked, prompt = (render(family, [ASKED], is_prompt) for is_prompt in (False, True))
    except DataError:
        return
    start, found, text = conversation.rpartition(WRITTEN.content)
    if not found:
        raise ModelError(
            "the chat template drops or changes what the assistant says; set data.template to one that writes it "
            "unchanged"
        )
    header = start.removeprefix(prompt).strip()
    if asked == prompt and start.startswith(prompt) and header:
        raise ModelError(
            f"the chat template writes {header!r} before an assistant's turn, but not before the policy's answer "
            "(add_generation_prompt); set data.template to one that does"
        )
    checkpoint, tokenizer = family.checkpoint, family.tokenizer
    more_than_text = {*tokenizer.added_tokens_decoder, *checkpoint.end_token_ids}
    around = set(tokenizer(asked, add_special_tokens=False)["input_ids"])
    special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    family.turn_tokens = tuple(special[number] for number in sorted(special.keys() & around))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    token = next((token for token in ids if token in more_than_text), None)
    family.turn_end = TurnEnd(text=text, token=token)
    if token is not None:
        ends = dict.fromkeys((token, *checkpoint.end_token_ids))
        family.checkpoint = replace(checkpoint, end_token_ids=tuple(ends))


def turn_end_line(family: Family) -> str | None:
    """Return a line for `check` that says what ends a turn, or None if the template did not show it."""
    end, names = family.turn_end, family.tokenizer.convert_ids_to_tokens(list(family.checkpoint.end_token_ids))
    if end is None:
        return None
    listed = " or ".join(names)
    if end.token is not None:
        if len(names) == 1:
            return f"an assistant's turn ends with {names[0]}, as the chat template writes it"
        return (
            f"an assistant's turn ends with {names[0]}, as the chat template writes it; a completion ends with {listed}"
        )
    if end.text.strip():
        return (
            f"the chat template writes {end.text.strip()!r} after an assistant's turn, which is not a token of this "
            f"tokenizer: a completion ends with {listed}"
        )
    return (
        f"the chat template writes no end after an assistant's turn: a completion ends with {listed}, and {names[0]} "
        "is trained after the last turn"
    )
