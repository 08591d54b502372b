"""One optimiser update from microbatches: logprobs, loss, backward, finite check, clip, step.

C completions, N scored tokens of a microbatch.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from tiercel.algorithms import LossInput, importance_weights, policy_loss
from tiercel.algorithms.correction import drift_sums, is_near_policy
from tiercel.config.schema import GrpoRecipe
from tiercel.devices import moved
from tiercel.errors import TrainingError
from tiercel.packing.batch import CompletionName, Microbatches, PolicyBatch
from tiercel.packing.examples import ExamplePass
from tiercel.packing.logprobs import TokenScores
from tiercel.training.finite import (
    TracedPart,
    UpdateTrace,
    faulty_examples,
    faulty_rows,
    gradient_size,
    non_finite,
    without_graph,
)
from tiercel.training.grpo.minibatches import Minibatch
from tiercel.training.grpo.precomputed_values import PrecomputedValues
from tiercel.training.grpo.train_inference_mismatch import LARGEST_GAP, gap_counts, gap_limits, require_near
from tiercel.training.offline.objectives import Objective, UpdateInputs
from tiercel.training.trainer import Trainer

SMALLEST_LOSS_SCALE = 2.0**-10
Accept = Callable[[Mapping[str, float], Mapping[str, float]], None]  # gets sums and largest values of all ranks' passes


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensSeen:
    """What the policy's pass saw in a microbatch, without gradient, on the device of the pass."""

    names_C: tuple[CompletionName, ...]
    completion_of_N: Tensor  # on the host
    logprobs_N: Tensor  # of the policy before the step's updates
    entropy_N: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """The result of one optimiser update; sums are over the tokens of all ranks."""

    loss: float
    grad_norm: float
    loss_sums: Mapping[str, float]  # over all scored tokens; one that was not computed adds 0
    tokens: int  # scored ones of the minibatch
    pass_sums: Mapping[str, float]  # over the tokens that went through the learner, whose number is `tokens`
    pass_largest: Mapping[str, float]  # over the same tokens
    was_skipped: bool  # fp16 overflow: the loss scale was lowered instead
    seen: tuple[TokensSeen, ...] = ()  # on this rank, by an update of GRPO

    def token_means(self, prefix: str) -> dict[str, float]:
        """Return the means over the passes' tokens of the sums whose names begin with `prefix`."""
        tokens = max(1, self.tokens)
        return {name: value / tokens for name, value in self.pass_sums.items() if name.startswith(prefix)}


NO_UPDATE = Update(
    loss=0.0,
    grad_norm=0.0,
    loss_sums={},
    tokens=0,
    pass_sums={"entropy/mean": 0.0, "packed/tokens": 0.0, "packed/repeated": 0.0},
    pass_largest={},
    was_skipped=False,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicrobatchLoss:
    """A microbatch's share of an update. All its numbers are on the device of the pass."""

    loss: Tensor  # with its graph
    loss_sums: Mapping[str, Tensor]
    pass_sums: Mapping[str, Tensor]
    tokens: int
    row_ids: tuple[str, ...]
    faulty_rows: Callable[[], tuple[str, ...]]  # the rows at fault if the loss is not finite
    pass_largest: Mapping[str, Tensor] = field(default_factory=dict)
    seen: TokensSeen | None = None


def policy_update(
    trainer: Trainer, minibatch: Minibatch, precomputed: Sequence[Sequence[PrecomputedValues]], recipe: GrpoRecipe
) -> Update:
    """Make one update with a policy-gradient loss. `precomputed` is per unit and microbatch. Raises NonFiniteError, and
    TrainingError if the engine has gone wrong."""
    units = minibatch.units
    passes = [
        policy_microbatch_losses(trainer, unit, each, recipe) for unit, each in zip(units, precomputed, strict=True)
    ]
    accept = partial(require_near, recipe, trainer.ranks.heartbeat.activity.step)
    with trainer.vision.update([images for unit in units for images in unit.images_of_passes]):
        return _backward_and_step(trainer, passes, minibatch.totals.tokens, accept)


def policy_microbatch_losses(
    trainer: Trainer, unit: Microbatches[PolicyBatch], precomputed: Sequence[PrecomputedValues], recipe: GrpoRecipe
) -> Iterator[MicrobatchLoss]:
    """Yield what each microbatch of a unit adds to the loss. Compute its gradient before asking for the next."""
    rewards_entropy = recipe.algorithm.entropy_coef > 0
    inputs = trainer.inputs(unit, with_gradient=True)
    for number, (batch, each) in enumerate(zip(unit.batches, precomputed, strict=True)):
        with trainer.training_mode():
            packed, features_KH, prefix = next(inputs)
            target = None if trainer.teacher is None else trainer.teacher.target(batch)
            scores = trainer.learner(packed, features_KH, trainer.temperature, prefix, rewards_entropy, target)
        own = _policy_microbatch_loss(batch, scores, each, trainer, recipe)
        yield replace(own, pass_sums={**own.pass_sums, **_counts(trainer, own.loss, unit, number)})
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


def _counts(trainer: Trainer, like: Tensor, unit: Microbatches[Any], number: int) -> dict[str, Tensor]:
    """Count the tokens that a microbatch's pass computes, and those that rows by themselves would take; 0 for a pass
    without rows. The experts' load is weighted by the scored tokens, because metrics are means over tokens."""
    batch = unit.batches[number]
    repeated = batch.packed.repeated_length if batch.prompt_ids else 0
    tokens = repeated if trainer.learner.form == "repeated" or not repeated else unit.computed(number)
    counts = {"packed/tokens": tokens, "packed/repeated": repeated}
    load, scored = trainer.learner.expert_load.take(), len(batch.packed.targets_N)
    return {
        **{name: scored * each for name, each in load.items()},
        **{name: like.detach().new_full((), count) for name, count in counts.items()},
    }


def sharing_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Return `tokens/shared_fraction`: which part of the tokens of all rows was computed for another row too."""
    repeated = sums.get("packed/repeated", 0.0)
    return {"tokens/shared_fraction": 1 - sums["packed/tokens"] / repeated} if repeated else {}


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


def example_update(trainer: Trainer, objective: Objective, plan: UpdateInputs) -> Update:
    """Make one update from a step's examples. Raises NonFiniteError."""
    units = trainer.example_units(plan.made)
    passes = [example_microbatch_losses(trainer, objective, unit, plan) for unit in units]
    with trainer.vision.update([images for unit in units for images in unit.images_of_passes]):
        return _backward_and_step(trainer, passes, plan.tokens)


def example_microbatch_losses(
    trainer: Trainer, objective: Objective, unit: Microbatches[ExamplePass], plan: UpdateInputs
) -> Iterator[MicrobatchLoss]:
    """Yield what each microbatch of a unit adds to the loss. Compute its gradient before asking for the next."""
    inputs = trainer.inputs(unit, with_gradient=True)
    for number, each in enumerate(unit.batches):
        with trainer.training_mode():
            packed, features_KH, prefix = next(inputs)
            scores = trainer.learner(packed, features_KH, trainer.temperature, prefix, asked=objective.asked(each))
        share = objective.share(each, scores, plan)
        yield MicrobatchLoss(
            loss=share.loss,
            loss_sums=share.sums,
            pass_sums={
                **({} if scores.values_N is not None else {"entropy/mean": scores.entropy_N.sum()}),
                **_counts(trainer, share.loss, unit, number),
            },
            tokens=len(packed.targets_N),
            row_ids=each.prompt_ids,
            faulty_rows=partial(faulty_examples, each.prompt_ids, share.losses_B),
        )
    next(inputs, None)  # the gradients of open prefixes go back through them


def _backward_and_step(
    trainer: Trainer,
    passes: Sequence[Iterator[MicrobatchLoss]],
    tokens: int,
    accept: Accept = lambda sums, largest: None,
) -> Update:
    """Go backward through every microbatch, reduce, check, clip, step. All ranks step, or none does. `accept` raises,
    on all ranks alike, if the passes must not be learnt from."""
    strategy = trainer.strategy
    strategy.zero_gradients()
    sums, trace, parameters = _Sums(), UpdateTrace(), list(trainer.policy.trained_parameters().values())
    seen: list[TokensSeen] = []
    for number, losses in enumerate(passes):
        for part, backward_from in _with_planned_faults(trainer, losses):
            strategy.backward(backward_from, is_last=number + 1 == len(passes))
            loss, size = part.loss.detach(), gradient_size(parameters)
            trace.parts.append(TracedPart(row_ids=part.row_ids, loss=loss, faulty_rows=part.faulty_rows, size=size))
            sums.add(part, loss)
            seen += [] if part.seen is None else [part.seen]
    trainer.vision.backward()
    norm = strategy.reduce_gradients()
    *own, largest = sums.read()
    share = trainer.share_of_sums
    in_loss, in_pass = (trainer.ranks.sum({name: share * value for name, value in each.items()}) for each in own)
    largest_of_all = trainer.ranks.maxima(largest)
    if not math.isfinite(in_loss["loss"]) or not (math.isfinite(norm) or trainer.policy.compute_dtype == torch.float16):
        raise non_finite(trainer, in_loss["loss"], norm, trace)
    accept(in_pass, largest_of_all)
    was_updated = strategy.update(norm, trainer.max_grad_norm)
    if not was_updated and strategy.loss_scale < SMALLEST_LOSS_SCALE:
        raise TrainingError("float16 gradients overflow at every loss scale; use model.dtype: bfloat16 or float32")
    return Update(
        loss=in_loss.pop("loss"),
        grad_norm=norm if was_updated else 0.0,
        loss_sums=in_loss,
        tokens=tokens,
        pass_sums=in_pass,
        pass_largest=largest_of_all,
        was_skipped=not was_updated,
        seen=tuple(seen),
    )


def _with_planned_faults(trainer: Trainer, losses: Iterator[MicrobatchLoss]) -> Iterator[tuple[MicrobatchLoss, Tensor]]:
    """Yield each microbatch's share, and what its backward pass starts from: its loss. This is where the faults of
    reliability/faults.py enter an update: they make weights, a loss or a gradient NaN."""
    corrupted = trainer.ranks.heartbeat.maybe_corrupt
    if corrupted(1.0, "weights") != 1.0:
        next(iter(trainer.policy.trained_parameters().values())).data.mul_(math.nan)
    for part in losses:
        loss = corrupted(part.loss, "loss")
        yield replace(part, loss=loss), corrupted(loss, "gradient")


class _Sums:
    """Sums of the microbatches' numbers, kept on their device so that the host waits for it only once, at the end."""

    def __init__(self) -> None:
        self._in_loss: dict[str, Tensor] = {"loss": torch.zeros(())}
        self._in_pass: dict[str, Tensor] = {"tokens": torch.zeros(())}
        self._largest: dict[str, Tensor] = {}

    def add(self, part: MicrobatchLoss, loss: Tensor) -> None:
        """Add a microbatch's share. `loss` is detached."""
        tokens = loss.new_full((), part.tokens)
        for sums, more in (
            (self._in_loss, {"loss": loss, **part.loss_sums}),
            (self._in_pass, {"tokens": tokens, **part.pass_sums}),
        ):
            for name, value in more.items():
                sums[name] = sums.get(name, torch.zeros(())) + value
        for name, value in part.pass_largest.items():
            self._largest[name] = torch.fmax(self._largest.get(name, torch.zeros(())), value)  # ignores NaN

    def read(self) -> tuple[dict[str, float], ...]:
        """Return the sums of the loss, the sums of the passes, and the largest values."""
        tables = (self._in_loss, self._in_pass, self._largest)
        values = iter(torch.stack([value for table in tables for value in table.values()]).tolist())
        return tuple({name: next(values) for name in table} for table in tables)
