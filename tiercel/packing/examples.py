"""Rows to learn from without sampling, as items of a pack. Shape suffixes: docs/shapes.md."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from tiercel.packing.batch import Microbatch, MicrobatchUnit, units_of
from tiercel.packing.layout import Continuation, PackedTokens, PackItem, pack
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleBatch(Microbatch):
    """One microbatch of examples. The continuations of the pack are their conversations, in order."""

    examples: tuple[Example, ...]


def example_units(
    groups: Sequence[ExampleGroup], form: str, budget: int, may_run_prefix: bool, family: PictureFamily | None
) -> list[MicrobatchUnit[ExampleBatch]]:
    """Build the microbatches of bundles, as `units_of` does. With `family`, rows that begin alike share that
    beginning."""
    if not groups:
        return []
    numbers = iter(range(sum(len(group.items) for group in groups)))
    entries = [(group.examples[0].row.id, [next(numbers) for _ in group.items]) for group in groups]

    def batch_of(packed: PackedTokens, chosen: Sequence[int]) -> ExampleBatch:
        examples = tuple(example for number in chosen for example in groups[number].examples)
        return ExampleBatch(packed=packed, prompt_ids=tuple(each.row.id for each in examples), examples=examples)

    return units_of(pack(all_items(groups), family), entries, form, budget, may_run_prefix, batch_of)


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


def all_items(groups: Sequence[ExampleGroup]) -> list[PackItem]:
    """Return the items of all groups."""
    return list(chain.from_iterable(group.items for group in groups))
