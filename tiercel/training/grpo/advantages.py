"""Advantages of a step: the rewards of all ranks in one table, and each rank's share of the result."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from tiercel.algorithms import Options, RewardTable, advantage_of, advantages
from tiercel.config.schema import GrpoRecipe
from tiercel.distributed.ranks import Ranks
from tiercel.errors import NonFiniteError
from tiercel.packing.batch import AdvantageGroup, advantage_groups
from tiercel.training.grpo.precomputed_values import Penalties, kl_penalties
from tiercel.training.grpo.rollouts import SampledGroups
from tiercel.training.trainer import Trainer
from tiercel.types import ScoredCompletion, ScoredGroup

NOT_APPLICABLE = float("nan")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepAdvantages:
    """What a step learns from, on this rank."""

    groups: Sequence[AdvantageGroup]  # of the completions that have an advantage, with what a teacher says about them
    values: list[list[float | None]]  # by group and completion; None: not learnt from
    penalties: Penalties  # subtracted from the rewards


def compute_advantages(trainer: Trainer, sampled: SampledGroups, recipe: GrpoRecipe) -> StepAdvantages:
    """Subtract the KL penalty from the rewards if the recipe has it there, compute the advantages, and ask the teacher
    if there is one. All ranks call it. Raises NonFiniteError if an advantage is not finite."""
    penalties = kl_penalties(trainer, sampled.learnt)
    values = step_advantages(trainer.ranks, sampled.scored, recipe, penalties=penalties.of_group, among=sampled.chosen)
    groups = trainer.with_teacher_terms(advantage_groups(sampled.scored, values, penalties.old_logprobs))
    return StepAdvantages(groups=groups, values=values, penalties=penalties)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRewards:
    """The rewards of a group's scorable completions, in the form that ranks exchange."""

    index: int  # of the prompt in the global order
    totals: tuple[float, ...]
    rewards: tuple[tuple[float, ...], ...]
    is_correct: tuple[bool, ...]


def step_advantages(
    ranks: Ranks,
    scored: Sequence[ScoredGroup],
    recipe: GrpoRecipe,
    *,
    penalties: Mapping[int, Sequence[float]] | None = None,
    among: Collection[int] | None = None,
) -> list[list[float | None]]:
    """Compute the advantage of every completion of this rank's groups; None if it is not learnt from: masked, in a
    dropped group, or truncated if the recipe masks truncated ones. Raises NonFiniteError, on all ranks, if one is not
    finite.

    `penalties`: what is subtracted from the totals, by the prompt's index, for every completion that has one. `among`:
    indices of the prompts that are learnt from; None is all.
    """
    if not recipe.learns_from_rewards:
        return [[0.0 if each.completion.failure is None else None for each in group.completions] for group in scored]
    algorithm = recipe.algorithm
    mine = [
        group_rewards(group, (penalties or {}).get(group.group.prompt.index))
        for group in scored
        if among is None or group.group.prompt.index in among
    ]
    least = advantage_of(algorithm.advantage).least_group
    everyone = sorted((group for groups in ranks.all_gather(mine) for group in groups), key=lambda group: group.index)
    usable = [group for group in everyone if len(group.totals) >= least]
    options = Options(scale=algorithm.scale, pass_k=algorithm.pass_k, clip=algorithm.advantage_clip)
    table = reward_table(usable, [reward.weight for reward in recipe.rewards])
    values = iter(advantages(table, algorithm.advantage, options).tolist())
    by_index = {group.index: [next(values) for _ in group.totals] for group in usable}
    is_masked = algorithm.overlong == "mask"
    found = [_of_completions(group, by_index.get(group.group.prompt.index), is_masked) for group in scored]
    return _finite(ranks, scored, found)


def group_rewards(group: ScoredGroup, penalties: Sequence[float] | None) -> GroupRewards:
    """Collect the rewards of the completions that have a total. A completion that no reward judges counts as not
    correct."""
    scorable = [completion for completion in group.completions if completion.total is not None]
    return GroupRewards(
        index=group.group.prompt.index,
        totals=tuple(
            _total(completion) - penalty
            for completion, penalty in zip(scorable, penalties or [0.0] * len(scorable), strict=True)
        ),
        rewards=tuple(
            tuple(NOT_APPLICABLE if value.value is None else value.value for value in completion.rewards.values())
            for completion in scorable
        ),
        is_correct=tuple(bool(completion.is_correct) for completion in scorable),
    )


def reward_table(groups: Sequence[GroupRewards], weights: Sequence[float]) -> RewardTable:
    """Write the completions of all groups into one table, group after group."""
    rewards = [values for group in groups for values in group.rewards]
    width = len(rewards[0]) if rewards else len(weights)
    return RewardTable(
        totals_C=torch.tensor([total for group in groups for total in group.totals], dtype=torch.float32),
        group_of_C=torch.tensor([number for number, group in enumerate(groups) for _ in group.totals]),
        rewards_CF=torch.tensor(rewards, dtype=torch.float32).reshape(len(rewards), width),
        weights_F=torch.tensor(weights, dtype=torch.float32),
        is_correct_C=torch.tensor([right for group in groups for right in group.is_correct], dtype=torch.bool),
    )


def _finite(
    ranks: Ranks, scored: Sequence[ScoredGroup], advantages: list[list[float | None]]
) -> list[list[float | None]]:
    corrupt = ranks.heartbeat.maybe_corrupt
    advantages = [[None if each is None else corrupt(each, "advantage") for each in values] for values in advantages]
    own = [
        group.group.prompt.row.id
        for group, values in zip(scored, advantages, strict=True)
        if any(value is not None and not math.isfinite(value) for value in values)
    ]
    rows = ranks.all_gather(own)
    if any(rows):
        raise NonFiniteError("an advantage is not finite", rows)
    return advantages


def _of_completions(group: ScoredGroup, values: Sequence[float] | None, masks_truncated: bool) -> list[float | None]:
    """Put the values of the scorable completions at their places in the group; None elsewhere."""
    if values is None:
        return [None] * len(group.completions)
    remaining = iter(values)
    found = [next(remaining) if completion.total is not None else None for completion in group.completions]
    return [
        None if masks_truncated and completion.completion.is_truncated else value
        for completion, value in zip(group.completions, found, strict=True)
    ]


def _total(completion: ScoredCompletion) -> float:
    assert completion.total is not None
    return completion.total
