"""Passes without gradient: what is known of a minibatch before its update, and the KL penalty in the reward.

C completions, N scored tokens of a microbatch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.algorithms import completions
from tiercel.algorithms.policy_loss import entropy_threshold
from tiercel.config.conflicts.algorithm import updates_per_rollout
from tiercel.config.schema import GrpoRecipe
from tiercel.devices import moved
from tiercel.distributed.ranks import Ranks
from tiercel.packing.batch import AdvantageGroup, MicrobatchUnit, PolicyBatch, advantage_groups, in_completion_order
from tiercel.training.policy_passes import NO_TOTALS
from tiercel.training.trainer import Trainer
from tiercel.types import ScoredGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecomputedValues:
    """Values of a microbatch that are computed before its update."""

    old_logprobs_N: Tensor | None = None  # None: the pass's own value is the ratio's denominator
    reference_logprobs_N: Tensor | None = None  # None if the loss has no KL term
    is_chosen_N: Tensor | None = None  # bool, the tokens that the policy term learns from; None: all


def precompute_values(
    trainer: Trainer, units: Sequence[MicrobatchUnit], recipe: GrpoRecipe
) -> list[list[PrecomputedValues]]:
    """Compute, per unit and microbatch, only what the recipe needs. The policy's own pass gives old logprobs if a
    rollout serves several updates and the penalty in the reward has not computed them, and entropies if only the
    highest are learnt from. The reference's pass is needed if the loss has a KL term."""
    needs_old, share, kl = updates_per_rollout(recipe) > 1, recipe.algorithm.top_entropy, trainer.kl
    old: Sequence[Sequence[Tensor | None]] = [[None] * len(unit.batches) for unit in units]
    chosen, references = old, old
    if share == 1 and needs_old and kl is not None and kl.in_reward:
        old = [[batch.old_logprobs_N for batch in unit.batches] for unit in units]
    elif share < 1 or needs_old:
        scores = [trainer.scores(unit) for unit in units]
        if needs_old:
            old = [[each.logprobs_N for each in of_unit] for of_unit in scores]
        if share < 1:
            entropies = [[each.entropy_N for each in of_unit] for of_unit in scores]
            is_of_all = recipe.algorithm.top_entropy_of == "all"
            threshold = _threshold(trainer.ranks, units, entropies, share, is_of_all=is_of_all)
            chosen = [[entropy_N >= threshold for entropy_N in of_unit] for of_unit in entropies]
    if kl is not None and kl.in_loss:
        references = trainer.reference_logprobs(units)
    return [
        [
            PrecomputedValues(old_logprobs_N=old_N, reference_logprobs_N=reference_N, is_chosen_N=is_chosen_N)
            for old_N, reference_N, is_chosen_N in zip(*of_unit, strict=True)
        ]
        for of_unit in zip(old, references, chosen, strict=True)
    ]


def _threshold(
    ranks: Ranks,
    units: Sequence[MicrobatchUnit],
    entropies: Sequence[Sequence[Tensor]],
    share: float,
    *,
    is_of_all: bool,
) -> float:
    """Return the entropy above which tokens are learnt from, over the completions of all ranks that have an advantage,
    so that it does not depend on which groups without one went through the learner; or over all completions, which then
    all did."""
    found = [entropy_N for of_unit in entropies for entropy_N in of_unit]
    counts = [_has_advantage(batch) | is_of_all for unit in units for batch in unit.batches]
    every = ranks.all_gather(torch.cat(found).cpu()[torch.cat(counts)] if found else torch.empty(0))
    return entropy_threshold(torch.cat(every), share)


def _has_advantage(batch: PolicyBatch) -> Tensor:
    """Return a bool (N,), true if the token's completion has an advantage."""
    return (batch.advantages_C != 0)[batch.packed.continuation_of_N]


@dataclass(frozen=True, kw_only=True, slots=True)
class Penalties:
    """KL penalties by the prompt's index, for each of its completions that has a total."""

    of_group: Mapping[int, tuple[float, ...]]  # coef x sum of the estimates over the completion's tokens
    old_logprobs: Mapping[int, tuple[Tensor, ...]] | None  # fp32, of the policy before the step's updates
    kl_sum: float  # of the estimates over the tokens of this rank
    tokens: int

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Return `kl/mean` over the tokens of all ranks, if it was computed here."""
        return {} if self.old_logprobs is None else ranks.all_reduce_mean("kl/mean", self.kl_sum, self.tokens)


NO_PENALTIES = Penalties(of_group={}, old_logprobs=None, kl_sum=0.0, tokens=0)


def kl_penalties(trainer: Trainer, scored: Sequence[ScoredGroup]) -> Penalties:
    """Compute the penalties that are subtracted from the rewards, by one pass of the policy and one of the reference
    over this rank's scorable completions; empty if the recipe has no such penalty. All ranks call it."""
    kl = trainer.kl
    if kl is None or kl.in_loss:
        return NO_PENALTIES
    every = [[0.0 if each.total is not None else None for each in group.completions] for group in scored]
    groups = trainer.with_partners(advantage_groups(scored, every), lambda group: (group.item,))
    units = trainer.units(groups, NO_TOTALS)
    policy = [trainer.scores(unit) for unit in units]
    references = trainer.reference_logprobs(units)
    logprobs: list[Tensor] = []
    sums: list[Tensor] = []
    lengths: list[int] = []
    for unit, scores, of_reference in zip(units, policy, references, strict=True):
        for batch, own, reference_N in zip(unit.batches, scores, of_reference, strict=True):
            own_N = own.logprobs_N
            completion_of_N, count = batch.packed.continuation_of_N, len(batch.advantages_C)
            owners_N = moved(completion_of_N, own_N.device)
            sums.append(completions.sums(kl.estimate(own_N, reference_N), owners_N, count))
            logprobs.append(own_N)
            lengths += batch.packed.scored_lengths
    if not units:
        return _by_group(groups, [], [], kl.coef)
    values = in_completion_order(units, torch.cat(sums).tolist())
    return _by_group(groups, values, in_completion_order(units, torch.cat(logprobs).cpu().split(lengths)), kl.coef)


def _by_group(
    groups: Sequence[AdvantageGroup], sums: Sequence[float], logprobs: Sequence[Tensor], coef: float
) -> Penalties:
    """Divide sums and logprobs of completions, which are in the groups' order, by group."""
    of_group, old_logprobs, start = {}, {}, 0
    for group in groups:
        end = start + len(group.sampler_logprobs)
        index = group.item.prompt.index
        of_group[index] = tuple(coef * value for value in sums[start:end])
        old_logprobs[index] = tuple(logprobs[start:end])
        start = end
    tokens = sum(len(row) for row in logprobs)
    return Penalties(of_group=of_group, old_logprobs=old_logprobs, kl_sum=sum(sums), tokens=tokens)
