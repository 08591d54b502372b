"""Rows to learn from without sampling, as items of a pack. Answers whose prompts begin alike share that computation.
Shape suffixes: docs/shapes.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from tiercel.packing.forms import packed_length
from tiercel.packing.layout import Continuation, PackItem
from tiercel.types import EncodedConversation, EncodedImage, EncodedPrompt, Example

IsVision = Callable[[Tensor], Tensor]  # token ids -> which of them are picture placeholders


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleGroup:
    """Examples that go through the learner together. The continuations of the items are the conversations of the
    examples, in order."""

    examples: tuple[Example, ...]
    items: tuple[PackItem, ...]

    @property
    def index(self) -> int:
        """Return the index of the first example in the global order."""
        return self.examples[0].prompt.index

    @property
    def images(self) -> tuple[EncodedImage, ...]:
        """Return all pictures, in the order of their placeholders."""
        return tuple(image for item in self.items for image in item.images)

    def length(self, form: str) -> int:
        """Return the number of tokens that a form computes."""
        return sum(packed_length(item, form) for item in self.items)


def bundles(
    examples: Sequence[Example], is_vision: IsVision, form: str, budget: int, *, share_rows: bool = False
) -> list[ExampleGroup]:
    """Bundle each example, or, with `share_rows`, neighbours whose prompts begin alike. Neighbours are bundled only up
    to `budget` tokens and only if that takes fewer tokens, because a pair's own question is then computed for each of
    its answers."""
    made: list[ExampleGroup] = []
    for example in examples:
        own = _bundle(example, is_vision)
        if share_rows and made:
            together = (*made[-1].examples, example)
            item = shared_item([each for one in together for each in one.conversations], is_vision)
            apart = made[-1].length(form) + own.length(form)
            if item is not None and packed_length(item, form) <= min(budget, apart - 1):
                made[-1] = ExampleGroup(examples=together, items=(item,))
                continue
        made.append(own)
    return made


def _bundle(example: Example, is_vision: IsVision) -> ExampleGroup:
    item = shared_item(example.conversations, is_vision)
    items = (item,) if item is not None else tuple(map(conversation_item, example.conversations))
    return ExampleGroup(examples=(example,), items=items)


def conversation_item(conversation: EncodedConversation) -> PackItem:
    """Build an item from a conversation: its prompt with one continuation."""
    return _item([conversation], len(conversation.prompt.token_ids_P))


def shared_item(conversations: Sequence[EncodedConversation], is_vision: IsVision) -> PackItem | None:
    """Build one item from conversations that begin alike: the common beginning is the prompt, and the rest of each is a
    continuation. Return None if they have no token in common, or if a picture lies outside the common beginning."""
    first, *others = conversations
    prompts = [conversation.prompt for conversation in conversations]
    length = min(len(prompt.token_ids_P) for prompt in prompts)
    for other in others:
        length = min(length, _common_length(first.prompt, other.prompt))
        if [image.sha256 for image in first.prompt.images] != [image.sha256 for image in other.prompt.images]:
            return None
    rests = [torch.cat([each.prompt.token_ids_P[length:], each.token_ids_L]) for each in conversations]
    if length == 0 or (others and any(bool(is_vision(rest_L).any()) for rest_L in rests)):
        return None
    return _item(conversations, length)


def _common_length(one: EncodedPrompt, other: EncodedPrompt) -> int:
    """Count the leading tokens, and their positions, that both prompts share."""
    length = min(len(one.token_ids_P), len(other.token_ids_P))
    differs_P = one.token_ids_P[:length] != other.token_ids_P[:length]
    differs_P |= (one.positions_DP[:, :length] != other.positions_DP[:, :length]).any(0)
    return int(differs_P.int().argmax()) if bool(differs_P.any()) else length


def _item(conversations: Sequence[EncodedConversation], length: int) -> PackItem:
    """Cut the conversations after `length` tokens, which become their common prompt."""
    prompt = conversations[0].prompt
    return PackItem(
        prompt=replace(
            prompt,
            token_ids_P=prompt.token_ids_P[:length],
            positions_DP=prompt.positions_DP[:, :length],
        ),
        continuations=tuple(_rest(conversation, length) for conversation in conversations),
    )


def _rest(conversation: EncodedConversation, length: int) -> Continuation:
    prompt = conversation.prompt
    rest_P = prompt.token_ids_P[length:]
    return Continuation(
        token_ids_L=torch.cat([rest_P, conversation.token_ids_L]),
        positions_DL=torch.cat([prompt.positions_DP[:, length:], conversation.positions_DL], dim=1),
        is_scored_L=torch.cat([torch.zeros(len(rest_P), dtype=torch.bool), conversation.is_scored_L]),
        picture_spans=conversation.picture_spans,
    )


def all_items(made: Sequence[ExampleGroup]) -> list[PackItem]:
    """Return the items of all bundles."""
    return list(chain.from_iterable(bundle.items for bundle in made))
