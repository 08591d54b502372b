"""How a step's work is divided among the ranks: minibatches of the global order, balanced by tokens."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tiercel.algorithms import Totals
from tiercel.config.schema import GrpoRecipe
from tiercel.distributed.balance import balancing_moves
from tiercel.distributed.ranks import Ranks
from tiercel.packing.batch import AdvantageGroup, Microbatches, TokenCounter, totals_of, without_zero_groups
from tiercel.packing.examples import ExampleGroup, example_groups
from tiercel.packing.layout import PackItem
from tiercel.training.grpo.group_sharding import split_across_ranks
from tiercel.training.policy_passes import NO_TOTALS, Passes
from tiercel.training.trainer import Trainer
from tiercel.types import EncodedImage, Example

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Minibatch:
    """The groups of one update."""

    totals: Totals  # over all ranks
    units: Sequence[Microbatches]  # that this rank computes


def minibatches(trainer: Trainer, groups: Sequence[AdvantageGroup], recipe: GrpoRecipe) -> list[Minibatch]:
    """Cut a step's groups into minibatches, the same on any number of ranks, and divide each among the ranks."""
    shares = minibatch_shares(trainer.ranks, groups, recipe.optim.minibatches, lambda group: group.item.prompt.index)
    return [_minibatch(trainer, share, recipe) for share in shares]


def _minibatch(trainer: Trainer, groups: Sequence[AdvantageGroup], recipe: GrpoRecipe) -> Minibatch:
    ranks = trainer.ranks
    totals = sum(ranks.gather(totals_of(groups)), NO_TOTALS)
    parts = split_across_ranks(ranks, learnt_groups(trainer, groups, recipe), trainer.learners)
    learnt = trainer.with_partners(balanced(trainer, parts, _packed), _packed)
    return Minibatch(totals=totals, units=trainer.units(learnt, totals))


def _packed(group: AdvantageGroup) -> tuple[PackItem]:
    return (group.item,)


def learnt_groups(trainer: Trainer, groups: Sequence[AdvantageGroup], recipe: GrpoRecipe) -> Sequence[AdvantageGroup]:
    """Return the groups that the learner computes: only those with a nonzero advantage if the loss has no other
    term."""
    has_kl = trainer.kl is not None and trainer.kl.in_loss
    has_other_term = has_kl or trainer.teacher is not None or recipe.algorithm.entropy_coef > 0
    compares_all = recipe.algorithm.top_entropy < 1 and recipe.algorithm.top_entropy_of == "all"
    skips = recipe.learner.skip_zero_advantage and not has_other_term and not compares_all
    return without_zero_groups(groups) if skips else groups


def learnt_items(trainer: Trainer, groups: Sequence[AdvantageGroup], recipe: GrpoRecipe) -> list[PackItem]:
    """List what the updates of a step compute in each epoch over the rollout."""
    return [group.item for group in learnt_groups(trainer, groups, recipe)]


def grouped_by_rank(passes: Passes, examples: Sequence[Example]) -> list[ExampleGroup]:
    """Divide a step's examples among the ranks, and return this rank's."""
    return balanced(passes, example_groups(examples, passes.sharing_family), lambda group: group.items)


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


def minibatch_shares(ranks: Ranks, items: Sequence[T], count: int, index_of: Callable[[T], int]) -> list[list[T]]:
    """Split this rank's items into `count` minibatches, or fewer if there are fewer items. Each is a run of the global
    order, cut at the same places on any number of ranks."""
    every = sorted(index for indices in ranks.gather([index_of(item) for item in items]) for index in indices)
    parts = min(count, max(1, len(every)))
    firsts = [every[len(every) * number // parts] for number in range(1, parts)]
    shares: list[list[T]] = [[] for _ in range(parts)]
    for item in items:
        shares[bisect_right(firsts, index_of(item))].append(item)
    return shares


def balanced(passes: Passes, items: Sequence[T], packed: Callable[[T], Sequence[PackItem]]) -> list[T]:
    """Move items between ranks so that all have nearly the same number of tokens to compute; each rank's items are in
    the global order. Neighbours that share a beginning stay together.

    Features that a frozen tower has computed travel along, so that no picture is computed twice.
    """
    ranks, vision = passes.ranks, passes.vision
    if ranks.world_size == 1:
        return list(items)
    runs = sharing_runs(passes, items, packed)
    moves = balancing_moves(ranks.gather([run.tokens for run in runs]), ranks.world_size // passes.learners)
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


def sharing_runs(passes: Passes, items: Sequence[T], packed: Callable[[T], Sequence[PackItem]]) -> list[Neighbours[T]]:
    """Join neighbours that begin alike, for as long as they fit into one microbatch: on one rank, what they share is
    computed once."""
    runs: list[Neighbours[T]] = []
    for item in items:
        counter = passes.token_counter()
        alone = counter.with_items(packed(item))
        if runs:
            last = runs[-1]
            together = last.counter.with_items(packed(item))
            if together < last.tokens + alone and together <= passes.max_tokens:
                runs[-1] = Neighbours(items=[*last.items, item], tokens=together, counter=last.counter)
                continue
        runs.append(Neighbours(items=[item], tokens=alone, counter=counter))
    return runs


def _images(items: Sequence[PackItem]) -> tuple[EncodedImage, ...]:
    return tuple(image for item in items for image in item.images)
