"""How a step's work lies on the ranks: minibatches of the global order, balanced by tokens, padded in number."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tiercel.config.schema import SftRecipe
from tiercel.distributed.balance import balancing_moves
from tiercel.distributed.ranks import Ranks
from tiercel.learner.batch import conversation_item, empty_item, packed_bins
from tiercel.learner.forms import packed_length
from tiercel.learner.layout import PackedTokens, PackItem, pack
from tiercel.learner.learner import Learner
from tiercel.models.family import Family
from tiercel.models.policy import Policy
from tiercel.models.vision import VisionStore
from tiercel.types import EncodedConversation, EncodedPrompt

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parcel:
    """An item on its way to another rank, with what was computed of its pictures."""

    item: Any
    features: dict[str, Any]


def minibatch_shares(ranks: Ranks, items: Sequence[T], count: int, index_of: Callable[[T], int]) -> list[list[T]]:
    """This rank's items of each of `count` minibatches (fewer where there are fewer items): runs of the global order,
    whoever holds them, cut in the same places on any number of ranks."""
    every = sorted(index for indices in ranks.gather([index_of(item) for item in items]) for index in indices)
    parts = min(count, max(1, len(every)))
    firsts = [every[len(every) * number // parts] for number in range(1, parts)]
    shares: list[list[T]] = [[] for _ in range(parts)]
    for item in items:
        shares[bisect_right(firsts, index_of(item))].append(item)
    return shares


def balanced(
    ranks: Ranks,
    items: Sequence[T],
    cost: Callable[[T], int],
    prompt_of: Callable[[T], EncodedPrompt],
    vision: VisionStore,
) -> list[T]:
    """The ranks' items, moved so that all have nearly as many tokens to compute; each rank's in the global order.

    Computed features of a frozen tower travel along, so that no picture is computed twice.
    """
    if ranks.world_size == 1:
        return list(items)
    moves = balancing_moves(ranks.gather([cost(item) for item in items]))
    parcels = {
        number: _Parcel(item=items[move.item], features=vision.held(prompt_of(items[move.item]).images))
        for number, move in enumerate(moves)
        if move.sender == ranks.rank
    }
    received = ranks.send([(move.sender, move.receiver) for move in moves], parcels)
    gone = {move.item for move in moves if move.sender == ranks.rank}
    kept = [item for place, item in enumerate(items) if place not in gone]
    for parcel in received.values():
        vision.adopt(parcel.features)
        kept.append(parcel.item)
    return sorted(kept, key=lambda item: prompt_of(item).index)


class Passes(Protocol):
    """What passes over conversations need; a training engine is one."""

    @property
    def policy(self) -> Policy: ...

    @property
    def learner(self) -> Learner: ...

    @property
    def vision(self) -> VisionStore: ...

    @property
    def ranks(self) -> Ranks: ...

    @property
    def passes_are_private(self) -> bool: ...


def conversation_passes(
    engine: Passes, conversations: Sequence[EncodedConversation], recipe: SftRecipe
) -> list[tuple[PackedTokens, tuple[str, ...]]]:
    """What this rank computes of a step of SFT: packed conversations within the token budget, with their row ids."""
    ranks, form, vision = engine.ranks, engine.learner.form, engine.vision
    items = balanced(
        ranks,
        [conversation_item(conversation) for conversation in conversations],
        lambda item: packed_length(item, form),
        lambda item: item.prompt,
        vision,
    )
    bins = ranks.together(lambda: packed_bins(items, form, recipe.learner.max_tokens_per_microbatch))
    passes = [(pack([items[i] for i in bin_]), tuple(items[i].prompt.row.id for i in bin_)) for bin_ in bins]
    missing = passes_to_add(ranks, len(passes), passes_are_private=engine.passes_are_private)
    return passes + [(pack([padding_item(engine.policy.family)]), ())] * missing


def passes_to_add(ranks: Ranks, own: int, *, passes_are_private: bool) -> int:
    """Empty passes after `own`, so that all ranks make as many, and one at least; none where passes are private."""
    return 0 if passes_are_private else max(1, ranks.largest(own)) - own


def padding_item(family: Family) -> PackItem:
    """An empty pass for this family."""
    ordinary = next(i for i in range(family.vocabulary_size) if i not in family.placeholder_ids)
    return empty_item(family.position_dimensions, ordinary)
