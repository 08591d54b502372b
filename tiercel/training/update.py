"""One optimiser update from microbatches: logprobs, loss, backward, finite check, clip, step.

N scored tokens of a microbatch.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tiercel.algorithms import KL_ESTIMATORS, LOSSES, LossInput
from tiercel.config.schema import Algorithm
from tiercel.distributed.strategy import Strategy
from tiercel.errors import TrainingError
from tiercel.learner.batch import PolicyBatch
from tiercel.learner.layout import PackedTokens
from tiercel.models.policy import Policy
from tiercel.models.vision import VisionStore
from tiercel.training.optimizer import clip_gradients, gradient_norm

SMALLEST_LOSS_SCALE = 2.0**-10


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """What computes and applies updates; built once per run."""

    policy: Policy
    learner: nn.Module
    vision: VisionStore
    strategy: Strategy
    parameters: Mapping[str, nn.Parameter]
    optimizer: torch.optim.AdamW
    scaler: torch.amp.GradScaler  # disabled unless the policy computes in float16
    max_grad_norm: float
    temperature: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What one optimiser update did; sums are over scored tokens of all ranks."""

    loss: float
    grad_norm: float
    token_sums: Mapping[str, float]
    tokens: int
    was_skipped: bool  # fp16 overflow: the loss scale was lowered instead


@contextmanager
def training_mode(learner: nn.Module) -> Iterator[None]:
    """Dropout and activation checkpointing are on inside."""
    learner.train()
    try:
        yield
    finally:
        learner.eval()


def token_logprobs(engine: Engine, packed: PackedTokens) -> Tensor:
    """Logprobs (N,) without gradient."""
    with torch.no_grad():
        features_KH = engine.vision.features(packed.images)
        return engine.learner(packed, features_KH, engine.temperature).logprobs_N


def reference_logprobs(engine: Engine, packed: PackedTokens) -> Tensor:
    """Logprobs (N,) of the policy that the run started from, through the same path."""
    with engine.policy.as_reference(), torch.no_grad():
        features_KH = engine.vision.features(packed.images, of_reference=True)
        return engine.learner(packed, features_KH, engine.temperature).logprobs_N


def policy_update(
    engine: Engine, batches: Sequence[PolicyBatch], old_logprobs: Sequence[Tensor | None], algorithm: Algorithm
) -> Update:
    """One update by a policy-gradient loss. `old_logprobs` per microbatch; None where the step is on policy and
    the ratio's denominator is the pass's own value."""

    def contribution(batch: PolicyBatch, old_N: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        packed = batch.packed
        reference_N = reference_logprobs(engine, packed) if algorithm.kl.coef else None
        with training_mode(engine.learner):
            features_KH = engine.vision.features(packed.images, with_gradient=True)
            scores = engine.learner(packed, features_KH, engine.temperature)
        logprobs_N = scores.logprobs_N
        device = logprobs_N.device
        estimate = KL_ESTIMATORS[algorithm.kl.estimator]
        output = LOSSES[algorithm.loss](
            LossInput(
                logprobs_N=logprobs_N,
                old_logprobs_N=logprobs_N.detach() if old_N is None else old_N,
                kl_N=None if reference_N is None else estimate(logprobs_N, reference_N),
                advantages_C=batch.advantages_C.to(device),
                completion_of_N=packed.continuation_of_N.to(device),
                totals=batch.totals,
                clip_low=algorithm.clip_low,
                clip_high=algorithm.clip_high,
                kl_coef=algorithm.kl.coef,
            )
        )
        gap_N = (logprobs_N.detach() - batch.sampler_logprobs_N.to(device)).abs()
        sums = {"entropy/mean": scores.entropy_N.sum(), "sampler/logprob_gap_mean": gap_N.sum()}
        return output.loss, {**output.token_sums, **sums}

    rows = [batch.prompt_ids for batch in batches]
    pairs = list(zip(batches, old_logprobs, strict=True))
    steps = [lambda batch=batch, old_N=old_N: contribution(batch, old_N) for batch, old_N in pairs]
    return _apply(engine, steps, rows, batches[0].totals.tokens)


def sft_update(engine: Engine, batches: Sequence[PackedTokens], row_ids: Sequence[tuple[str, ...]]) -> Update:
    """One update by the negative mean logprob of the scored tokens of all ranks."""
    tokens = engine.strategy.global_sums({"tokens": torch.tensor(sum(len(b.targets_N) for b in batches))})["tokens"]

    def contribution(packed: PackedTokens) -> tuple[Tensor, dict[str, Tensor]]:
        with training_mode(engine.learner):
            features_KH = engine.vision.features(packed.images, with_gradient=True)
            scores = engine.learner(packed, features_KH, engine.temperature)
        return -scores.logprobs_N.sum() / tokens, {"entropy/mean": scores.entropy_N.sum()}

    steps = [lambda packed=packed: contribution(packed) for packed in batches]
    return _apply(engine, steps, row_ids, int(tokens))


def _apply(
    engine: Engine,
    contributions: Sequence[Callable[[], tuple[Tensor, dict[str, Tensor]]]],
    row_ids: Sequence[tuple[str, ...]],
    tokens: int,
) -> Update:
    """Backward through every microbatch, check, clip, step."""
    engine.optimizer.zero_grad(set_to_none=True)
    sums: dict[str, Tensor] = {"loss": torch.zeros(())}
    for compute, rows in zip(contributions, row_ids, strict=True):
        loss, token_sums = compute()
        if not bool(torch.isfinite(loss)):
            raise TrainingError(f"the loss is {float(loss)} for rows {', '.join(rows)}; no parameter was changed")
        engine.strategy.backward(engine.scaler.scale(loss))
        for name, value in {"loss": loss.detach(), **token_sums}.items():
            sums[name] = sums.get(name, torch.zeros(())) + value.cpu()
    engine.strategy.reduce_gradients(list(engine.parameters.values()))
    engine.scaler.unscale_(engine.optimizer)
    norm = gradient_norm(engine.parameters)
    overflowed = not math.isfinite(float(norm))
    if overflowed and not engine.scaler.is_enabled():
        names = ", ".join(row for rows in row_ids for row in rows)
        raise TrainingError(f"the gradient norm is {float(norm)} for rows {names}; no parameter was changed")
    if not overflowed:
        clip_gradients(engine.parameters, norm, engine.max_grad_norm)
    engine.scaler.step(engine.optimizer)
    engine.scaler.update()
    if overflowed and engine.scaler.get_scale() < SMALLEST_LOSS_SCALE:
        raise TrainingError("float16 gradients overflow at every loss scale; use model.dtype: bfloat16 or float32")
    totals = engine.strategy.global_sums(sums)
    return Update(
        loss=totals.pop("loss"),
        grad_norm=float(norm) if not overflowed else 0.0,
        token_sums=totals,
        tokens=tokens,
        was_skipped=overflowed,
    )
