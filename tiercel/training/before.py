"""What is computed of a minibatch before its update: old logprobs, and which tokens are learnt from.

N scored tokens of a microbatch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tiercel.algorithms.selection import entropy_threshold
from tiercel.config.algorithm_rules import updates_per_rollout
from tiercel.config.schema import GrpoRecipe
from tiercel.learner.batch import PolicyBatch, PolicyUnit
from tiercel.training.penalty import penalises_reward
from tiercel.training.update import Before, Engine, unit_scores


def before_updates(engine: Engine, units: Sequence[PolicyUnit], recipe: GrpoRecipe) -> list[list[Before]]:
    """Per unit and microbatch. One pass without gradient, and only where the recipe needs it: for old logprobs where a
    rollout gives several updates and the penalty in the reward has not computed them, for entropies where only the
    highest are learnt from."""
    needs_old, share = updates_per_rollout(recipe) > 1, recipe.algorithm.top_entropy
    if share == 1 and (penalises_reward(recipe) or not needs_old):
        return [
            [Before(old_logprobs_N=batch.old_logprobs_N if needs_old else None) for batch in unit.batches]
            for unit in units
        ]
    scores = [unit_scores(engine, unit) for unit in units]
    threshold = None
    if share < 1:
        threshold = _threshold(engine, units, [[each.entropy_N for each in of_unit] for of_unit in scores], share)
    return [
        [
            Before(
                old_logprobs_N=each.logprobs_N if needs_old else None,
                is_chosen_N=None if threshold is None else each.entropy_N >= threshold,
            )
            for each in of_unit
        ]
        for of_unit in scores
    ]


def _threshold(
    engine: Engine, units: Sequence[PolicyUnit], entropies: Sequence[Sequence[Tensor]], share: float
) -> float:
    """Over the tokens of all ranks' completions with an advantage, so that it does not depend on which groups without
    one went through the learner."""
    own = [
        entropy_N[_has_advantage(batch).to(entropy_N.device)].cpu()
        for unit, of_unit in zip(units, entropies, strict=True)
        for batch, entropy_N in zip(unit.batches, of_unit, strict=True)
    ]
    every = engine.ranks.gather(torch.cat(own) if own else torch.empty(0))
    return entropy_threshold(torch.cat(every), share)


def _has_advantage(batch: PolicyBatch) -> Tensor:
    """bool (N,)."""
    return (batch.advantages_C != 0)[batch.packed.continuation_of_N]
