"""The KL penalty as a part of the reward: what each completion's way from the reference takes off its reward.

N scored tokens of a microbatch, C its completions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from tiercel.algorithms import KL_ESTIMATORS, Totals, completions
from tiercel.config.schema import GrpoRecipe
from tiercel.distributed.ranks import Ranks
from tiercel.learner.batch import AdvantageGroup, advantage_groups, empty_unit, policy_units
from tiercel.training.sharing import padding_item, passes_to_add
from tiercel.training.update import Engine, reference_logprobs, unit_scores
from tiercel.types import ScoredGroup

NO_TOTALS = Totals(tokens=0, completions=0, groups=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Penalties:
    """By the prompt's index, for each of its completions that has a total."""

    of_group: Mapping[int, tuple[float, ...]]  # coef x sum of the estimates over the completion's tokens
    old_logprobs: Mapping[int, tuple[Tensor, ...]] | None  # fp32, of the policy before the step's updates
    kl_sum: float  # of the estimates over the tokens of this rank
    tokens: int

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """`kl/mean` over the tokens of all ranks, where it was computed here."""
        return {} if self.old_logprobs is None else ranks.mean("kl/mean", self.kl_sum, self.tokens)


NONE = Penalties(of_group={}, old_logprobs=None, kl_sum=0.0, tokens=0)


def penalises_reward(recipe: GrpoRecipe) -> bool:
    """Whether the KL penalty is taken off the rewards."""
    return recipe.algorithm.kl.coef > 0 and recipe.algorithm.kl.place == "reward"


def kl_penalties(engine: Engine, scored: Sequence[ScoredGroup], recipe: GrpoRecipe) -> Penalties:
    """One pass of the policy and one of the reference over this rank's scorable completions, where the recipe takes the
    penalty off the reward. All ranks call it."""
    if not penalises_reward(recipe):
        return NONE
    every = [[0.0 if each.total is not None else None for each in group.completions] for group in scored]
    groups = advantage_groups(scored, every)
    private = engine.strategy.passes_are_private
    budget = recipe.learner.max_tokens_per_microbatch
    units = engine.ranks.together(lambda: policy_units(groups, NO_TOTALS, engine.learner.form, budget, private))
    missing = passes_to_add(engine.ranks, len(units), passes_are_private=private)
    estimate = KL_ESTIMATORS[recipe.algorithm.kl.estimator].estimate
    empty = [empty_unit(padding_item(engine.policy.family), NO_TOTALS)] * missing
    policy = [unit_scores(engine, unit) for unit in (*units, *empty)]
    references = reference_logprobs(engine, (*units, *empty))
    logprobs: list[Tensor] = []
    sums: list[float] = []
    for unit, scores, of_reference in zip(units, policy, references, strict=False):  # empty ones are behind
        for batch, own, reference_N in zip(unit.batches, scores, of_reference, strict=True):
            own_N = own.logprobs_N
            completion_of_N = batch.packed.continuation_of_N.to(own_N.device)
            count = len(batch.advantages_C)
            sums += completions.sums(estimate(own_N, reference_N), completion_of_N, count).tolist()
            logprobs += own_N.split(completions.lengths(completion_of_N, count).tolist())
    return _by_group(groups, sums, logprobs, recipe.algorithm.kl.coef)


def _by_group(
    groups: Sequence[AdvantageGroup], sums: Sequence[float], logprobs: Sequence[Tensor], coef: float
) -> Penalties:
    of_group, old_logprobs, start = {}, {}, 0
    for group in groups:
        end = start + len(group.sampler_logprobs)
        index = group.item.prompt.index
        of_group[index] = tuple(coef * value for value in sums[start:end])
        old_logprobs[index] = tuple(row.cpu() for row in logprobs[start:end])
        start = end
    tokens = sum(len(row) for row in logprobs)
    return Penalties(of_group=of_group, old_logprobs=old_logprobs, kl_sum=sum(sums), tokens=tokens)
