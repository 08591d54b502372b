"""What is computed of a minibatch before its update: old and reference logprobs, and which tokens are learnt from.

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
from tiercel.training.update import Before, Engine, reference_logprobs, unit_scores


def before_updates(engine: Engine, units: Sequence[PolicyUnit], recipe: GrpoRecipe) -> list[list[Before]]:
    """Per unit and microbatch, without gradient, and only what the recipe needs: the policy's own pass for old logprobs
    where a rollout gives several updates and the penalty in the reward has not computed them, and for entropies where
    only the highest are learnt from; the reference's pass where the loss has a KL term."""
    needs_old, share, kl = updates_per_rollout(recipe) > 1, recipe.algorithm.top_entropy, recipe.algorithm.kl
    old: Sequence[Sequence[Tensor | None]] = [[None] * len(unit.batches) for unit in units]
    chosen, references = old, old
    if share == 1 and needs_old and penalises_reward(recipe):
        old = [[batch.old_logprobs_N for batch in unit.batches] for unit in units]
    elif share < 1 or needs_old:
        scores = [unit_scores(engine, unit) for unit in units]
        if needs_old:
            old = [[each.logprobs_N for each in of_unit] for of_unit in scores]
        if share < 1:
            entropies = [[each.entropy_N for each in of_unit] for of_unit in scores]
            threshold = _threshold(engine, units, entropies, share)
            chosen = [[entropy_N >= threshold for entropy_N in of_unit] for of_unit in entropies]
    if kl.coef > 0 and kl.place == "loss":
        references = reference_logprobs(engine, units)
    return [
        [
            Before(old_logprobs_N=old_N, reference_logprobs_N=reference_N, is_chosen_N=is_chosen_N)
            for old_N, reference_N, is_chosen_N in zip(*of_unit, strict=True)
        ]
        for of_unit in zip(old, references, chosen, strict=True)
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
