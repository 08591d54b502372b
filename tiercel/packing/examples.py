"""Rows to learn from without sampling, as items of a pack. Shape suffixes: docs/shapes.md."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from tiercel.packing.layout import Continuation, PackItem
from tiercel.packing.sharing import PictureFamily, located
from tiercel.types import EncodedConversation, EncodedImage, Example


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleGroup:
    """Examples that go through the learner together: each conversation is an item, in order."""

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


def example_groups(examples: Sequence[Example], family: PictureFamily | None) -> list[ExampleGroup]:
    """Make each example a group of its own. `family` as in `conversation_item`."""
    return [
        ExampleGroup(
            examples=(example,), items=tuple(conversation_item(each, family) for each in example.conversations)
        )
        for example in examples
    ]


def conversation_item(conversation: EncodedConversation, family: PictureFamily | None = None) -> PackItem:
    """Build an item from a conversation: its prompt with one continuation. With `family`, each has the pictures that
    its own tokens show, which an item needs that shares tokens with others; without it, the prompt has all of them."""
    prompt = conversation.prompt
    shown = prompt.images
    if family is not None:
        shown = tuple(image for each in located(prompt.token_ids_P, shown, family) for image in each.images)
    continuation = Continuation(
        token_ids_L=conversation.token_ids_L,
        positions_DL=conversation.positions_DL,
        is_scored_L=conversation.is_scored_L,
        picture_spans=conversation.picture_spans,
        images=prompt.images[len(shown) :],
    )
    return PackItem(prompt=replace(prompt, images=shown), continuations=(continuation,))


def all_items(made: Sequence[ExampleGroup]) -> list[PackItem]:
    """Return the items of all groups."""
    return list(chain.from_iterable(group.items for group in made))
