"""The minibatches of a step of GRPO: parts of the global order, each divided among the ranks."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tiercel.algorithms import Totals
from tiercel.algorithms.losses import OwnLoss
from tiercel.config.schema import GrpoRecipe
from tiercel.distributed.ranks import Ranks
from tiercel.packing.batch import AdvantageGroup, MicrobatchUnit, totals_of, without_zero_groups
from tiercel.packing.layout import PackItem
from tiercel.training.grpo.group_sharding import split_across_ranks
from tiercel.training.policy_passes import NO_TOTALS
from tiercel.training.rank_balancing import balanced
from tiercel.training.trainer import Trainer

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Minibatch:
    """The groups of one update."""

    totals: Totals  # over all ranks
    units: Sequence[MicrobatchUnit]  # that this rank computes


def minibatches(trainer: Trainer, groups: Sequence[AdvantageGroup], recipe: GrpoRecipe) -> list[Minibatch]:
    """Cut a step's groups into minibatches, the same on any number of ranks, and divide each among the ranks."""
    shares = split_into_minibatches(
        trainer.ranks, groups, recipe.optim.minibatches, lambda group: group.item.prompt.index
    )
    return [_minibatch(trainer, share, recipe) for share in shares]


def _minibatch(trainer: Trainer, groups: Sequence[AdvantageGroup], recipe: GrpoRecipe) -> Minibatch:
    ranks = trainer.ranks
    totals = sum(ranks.all_gather(totals_of(groups)), NO_TOTALS)
    parts = split_across_ranks(ranks, learnt_groups(trainer, groups, recipe), trainer.data_parallel_size)
    learnt = trainer.with_partners(balanced(trainer, parts, _packed), _packed)
    return Minibatch(totals=totals, units=trainer.units(learnt, totals))


def _packed(group: AdvantageGroup) -> tuple[PackItem]:
    return (group.item,)


def learnt_groups(trainer: Trainer, groups: Sequence[AdvantageGroup], recipe: GrpoRecipe) -> Sequence[AdvantageGroup]:
    """Return the groups that the learner computes: only those with a nonzero advantage if the loss has no other term,
    as a loss of the user's own may have."""
    has_kl = trainer.kl is not None and trainer.kl.in_loss
    has_other_term = has_kl or trainer.teacher is not None or recipe.algorithm.entropy_coef > 0
    has_other_term |= isinstance(recipe.algorithm.loss, OwnLoss)
    compares_all = recipe.algorithm.top_entropy < 1 and recipe.algorithm.top_entropy_of == "all"
    skips = recipe.learner.skip_zero_advantage and not has_other_term and not compares_all
    return without_zero_groups(groups, keeps_nan=recipe.rollout.engine_kind.shares_weights) if skips else groups


def learnt_items(trainer: Trainer, groups: Sequence[AdvantageGroup], recipe: GrpoRecipe) -> list[PackItem]:
    """List what the updates of a step compute in each epoch over the rollout."""
    return [group.item for group in learnt_groups(trainer, groups, recipe)]


def split_into_minibatches(ranks: Ranks, items: Sequence[T], count: int, index_of: Callable[[T], int]) -> list[list[T]]:
    """Split this rank's items into `count` minibatches, or fewer if there are fewer items. Each is a run of the global
    order, cut at the same places on any number of ranks."""
    every = sorted(index for indices in ranks.all_gather([index_of(item) for item in items]) for index in indices)
    parts = min(count, max(1, len(every)))
    firsts = [every[len(every) * number // parts] for number in range(1, parts)]
    shares: list[list[T]] = [[] for _ in range(parts)]
    for item in items:
        shares[bisect_right(firsts, index_of(item))].append(item)
    return shares
