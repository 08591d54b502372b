"""The policy loss of a microbatch, and the update that a minibatch of them makes.

C completions, N scored tokens of a microbatch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

import torch
from torch import Tensor

from tiercel.algorithms import LossInput, importance_weights, policy_loss
from tiercel.algorithms.correction import drift_sums, is_near_policy
from tiercel.config.schema import GrpoRecipe
from tiercel.devices import moved
from tiercel.packing.batch import MicrobatchUnit, PolicyBatch
from tiercel.packing.logprobs import TokenScores
from tiercel.packing.pass_options import PassOptions
from tiercel.training.grpo.minibatches import Minibatch
from tiercel.training.grpo.precomputed_values import PrecomputedValues
from tiercel.training.grpo.train_inference_mismatch import LARGEST_GAP, gap_counts, gap_limits, require_near
from tiercel.training.nonfinite_guard import faulty_rows, without_graph
from tiercel.training.optimizer_step import MicrobatchLoss, TokensSeen, Update, backward_and_step, pass_counts
from tiercel.training.trainer import Trainer


def update_on_minibatch(
    trainer: Trainer, minibatch: Minibatch, precomputed: Sequence[Sequence[PrecomputedValues]], recipe: GrpoRecipe
) -> Update:
    """Make one update with a policy-gradient loss. `precomputed` is per unit and microbatch. Raises NonFiniteError, and
    TrainingError if the engine has gone wrong."""
    units = minibatch.units
    passes = [
        policy_microbatch_losses(trainer, unit, each, recipe) for unit, each in zip(units, precomputed, strict=True)
    ]
    accept = partial(require_near, recipe, trainer.ranks.heartbeat.activity.step)
    with trainer.training_mode(), trainer.vision.update([images for unit in units for images in unit.images_of_passes]):
        return backward_and_step(trainer, passes, minibatch.totals.tokens, accept)


def policy_microbatch_losses(
    trainer: Trainer, unit: MicrobatchUnit[PolicyBatch], precomputed: Sequence[PrecomputedValues], recipe: GrpoRecipe
) -> Iterator[MicrobatchLoss]:
    """Yield what each microbatch of a unit adds to the loss; the caller has turned on training mode. Compute its
    gradient before asking for the next."""
    rewards_entropy = recipe.algorithm.entropy_coef > 0
    inputs = trainer.inputs(unit, with_gradient=True)
    for number, (batch, each) in enumerate(zip(unit.batches, precomputed, strict=True)):
        packed, features_KH, prefix = next(inputs)
        target = None if trainer.teacher is None else trainer.teacher.target(batch)
        options = PassOptions(entropy_gradient=rewards_entropy, target=target)
        scores = trainer.learner(packed, features_KH, trainer.temperature, prefix, options)
        own = _policy_microbatch_loss(batch, scores, each, trainer, recipe)
        yield replace(own, pass_sums={**own.pass_sums, **pass_counts(trainer, own.loss, unit, number)})
    next(inputs, None)  # the gradients of open prefixes go back through them


def _policy_microbatch_loss(
    batch: PolicyBatch, scores: TokenScores, precomputed: PrecomputedValues, trainer: Trainer, recipe: GrpoRecipe
) -> MicrobatchLoss:
    algorithm, logprobs_N, reference_N = recipe.algorithm, scores.logprobs_N, precomputed.reference_logprobs_N
    kl, teacher = trainer.kl, None if trainer.teacher is None else trainer.teacher.term(batch, scores)
    device = logprobs_N.device
    detached_N = logprobs_N.detach()
    base_N = detached_N if precomputed.old_logprobs_N is None else moved(precomputed.old_logprobs_N, device)
    sampler_N = moved(batch.sampler_logprobs_N, device)
    advantages_C = moved(batch.advantages_C, device)
    completion_of_N = moved(batch.packed.continuation_of_N, device)
    comparison = compare_with_engine(base_N, sampler_N, completion_of_N, len(batch.names_C), recipe)
    factors = [comparison.weights_N, precomputed.is_chosen_N]
    if algorithm.off_policy_delta is not None:
        delta = algorithm.off_policy_delta
        factors.append(is_near_policy(logprobs_N, sampler_N, advantages_C, completion_of_N, delta))
    given = LossInput(
        logprobs_N=logprobs_N,
        old_logprobs_N=base_N,
        weights_N=_product(factors),
        kl_N=None if kl is None or reference_N is None else kl.term(logprobs_N, reference_N, base_N),
        entropy_N=scores.entropy_N if algorithm.entropy_coef > 0 else None,
        teacher_N=None if teacher is None else teacher.values_N,
        advantages_C=advantages_C,
        completion_of_N=completion_of_N,
        totals=batch.totals,
        longest=recipe.rollout.longest,
    )
    output = policy_loss(given, algorithm)
    return MicrobatchLoss(
        loss=output.loss,
        loss_sums=output.token_sums,
        pass_sums={
            "entropy/mean": scores.entropy_N.detach().sum(),
            **({} if teacher is None else {"teacher/kl": teacher.kl_sum}),
            **_learnt_share(factors[1:]),
            **comparison.sums,
        },
        pass_largest={LARGEST_GAP: comparison.largest_gap},
        tokens=len(logprobs_N),
        row_ids=batch.prompt_ids,
        faulty_rows=partial(faulty_rows, batch, without_graph(given), algorithm),
        seen=TokensSeen(
            names_C=batch.names_C,
            completion_of_N=batch.packed.continuation_of_N,
            logprobs_N=base_N,
            entropy_N=scores.entropy_N.detach(),
        ),
    )


def _product(factors: Sequence[Tensor | None]) -> Tensor | None:
    """Return the product of the factors, fp32 (N,); None if there is none."""
    given = [factor.float() for factor in factors if factor is not None]
    return reduce(torch.mul, given) if given else None  # CUDA compiles a kernel for `prod` when it first runs


def _learnt_share(masks: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """Count the tokens that the recipe's masks leave to the policy term; empty if it has no masks."""
    product_N = _product(masks)
    return {} if product_N is None else {"policy/learnt_fraction": product_N.sum()}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineComparison:
    """A microbatch's tokens under the learner and under the engine that drew them."""

    weights_N: Tensor | None  # importance weights; None if the recipe asks for none
    sums: Mapping[str, Tensor]
    largest_gap: Tensor


def compare_with_engine(
    old_logprobs_N: Tensor, sampler_logprobs_N: Tensor, completion_of_N: Tensor, count: int, recipe: GrpoRecipe
) -> EngineComparison:
    """Compare the tokens whose sampler logprob is known: their gaps, the distance between the policies, and the
    recipe's importance weights. `count` is the number of completions, C."""
    is_known_N = ~sampler_logprobs_N.isnan()
    gaps_N = (old_logprobs_N - sampler_logprobs_N).masked_fill(~is_known_N, 0.0)
    correction = recipe.algorithm.correction
    drift = drift_sums(old_logprobs_N, sampler_logprobs_N, completion_of_N, count)
    sums = {**gap_counts(gaps_N, is_known_N, gap_limits(recipe)), **drift}
    largest = gaps_N.abs().max() if len(gaps_N) else gaps_N.new_zeros(())
    if correction.level == "none":
        return EngineComparison(weights_N=None, sums=sums, largest_gap=largest)
    weights = importance_weights(old_logprobs_N, sampler_logprobs_N, completion_of_N, count, correction)
    sums |= {
        "correction/weight_mean": weights.values_N.sum(),
        "correction/capped_fraction": weights.is_capped_N.sum(),
    }
    return EngineComparison(weights_N=weights.values_N, sums=sums, largest_gap=largest)
