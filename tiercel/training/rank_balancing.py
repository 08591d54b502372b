"""How a step's rows, or its groups of completions, move between ranks so that all compute about as many tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tiercel.distributed.balance import balancing_moves
from tiercel.packing.batch import TokenCounter
from tiercel.packing.examples import ExampleGroup, example_groups
from tiercel.packing.layout import PackItem
from tiercel.training.policy_passes import PolicyPasses
from tiercel.types import EncodedImage, Example

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parcel:
    """Items on their way to another rank, with those features of their pictures that have been computed."""

    items: list[Any]
    features: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbours(Generic[T]):
    """Items next to each other on a rank that share what they begin with."""

    items: list[T]
    tokens: int  # that the learner computes for them
    counter: TokenCounter


def grouped_by_rank(passes: PolicyPasses, examples: Sequence[Example]) -> list[ExampleGroup]:
    """Divide a step's examples among the ranks, and return this rank's."""
    return balanced(passes, example_groups(examples, passes.sharing_family), lambda group: group.items)


def balanced(passes: PolicyPasses, items: Sequence[T], packed: Callable[[T], Sequence[PackItem]]) -> list[T]:
    """Move items between ranks so that all have nearly the same number of tokens to compute; each rank's items are in
    the global order. Neighbours that share a beginning stay together.

    Features that a frozen tower has computed travel along, so that no picture is computed twice.
    """
    ranks, vision = passes.ranks, passes.vision
    if ranks.world_size == 1:
        return list(items)
    runs = sharing_runs(passes, items, packed)
    moves = balancing_moves(
        ranks.all_gather([run.tokens for run in runs]), ranks.world_size // passes.data_parallel_size
    )
    parcels = {}
    for number, move in enumerate(moves):
        if move.sender == ranks.rank:
            own = runs[move.item].items
            images = _images([each for item in own for each in packed(item)])
            parcels[number] = _Parcel(items=own, features=vision.held(images))
    received = ranks.send([(move.sender, move.receiver) for move in moves], parcels)
    gone = {move.item for move in moves if move.sender == ranks.rank}
    kept = [item for place, run in enumerate(runs) if place not in gone for item in run.items]
    for parcel in received.values():
        vision.adopt(parcel.features)
        kept += parcel.items
    return sorted(kept, key=lambda item: packed(item)[0].prompt.index)


def sharing_runs(
    passes: PolicyPasses, items: Sequence[T], packed: Callable[[T], Sequence[PackItem]]
) -> list[Neighbours[T]]:
    """Join neighbours that begin alike, for as long as they fit into one microbatch: on one rank, what they share is
    computed once. Parts of one prompt's group stay apart, because they were cut for ranks that have none."""
    runs: list[Neighbours[T]] = []
    for item in items:
        counter = passes.token_counter()
        alone = counter.with_items(packed(item))
        if runs:
            last = runs[-1]
            together = last.counter.with_items(packed(item))
            is_cut = packed(last.items[-1])[0].prompt.index == packed(item)[0].prompt.index
            if not is_cut and together < last.tokens + alone and together <= passes.max_tokens:
                runs[-1] = Neighbours(items=[*last.items, item], tokens=together, counter=last.counter)
                continue
        runs.append(Neighbours(items=[item], tokens=alone, counter=counter))
    return runs


def _images(items: Sequence[PackItem]) -> tuple[EncodedImage, ...]:
    return tuple(image for item in items for image in item.images)
