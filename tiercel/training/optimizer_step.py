"""One optimiser update from the losses of microbatches: backward, finite check, clip, step.

C completions, N scored tokens of a microbatch.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tiercel.errors import TrainingError
from tiercel.packing.batch import CompletionName, MicrobatchUnit
from tiercel.training.nonfinite_guard import TracedMicrobatch, UpdateTrace, gradient_size, non_finite
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
    overflowed: bool  # fp16 overflow: the loss scale was lowered instead
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
    pass_sums={"packed/tokens": 0.0, "packed/repeated": 0.0},
    pass_largest={},
    overflowed=False,
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


def pass_counts(trainer: Trainer, like: Tensor, unit: MicrobatchUnit[Any], number: int) -> dict[str, Tensor]:
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


def backward_and_step(
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
            trace.parts.append(
                TracedMicrobatch(row_ids=part.row_ids, loss=loss, faulty_rows=part.faulty_rows, size=size)
            )
            sums.add(part, loss)
            seen += [] if part.seen is None else [part.seen]
    trainer.vision.backward()
    norm = strategy.reduce_gradients()
    *own, largest = sums.read()
    share = trainer.sum_weight
    in_loss, in_pass = (
        trainer.ranks.all_reduce_sums({name: share * value for name, value in each.items()}) for each in own
    )
    largest_of_all = trainer.ranks.all_reduce_maxima(largest)
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
        overflowed=not was_updated,
        seen=tuple(seen),
    )


def _with_planned_faults(trainer: Trainer, losses: Iterator[MicrobatchLoss]) -> Iterator[tuple[MicrobatchLoss, Tensor]]:
    """Yield each microbatch with the loss from which its backward pass starts. This is where the faults of
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
