"""Numbers that are not finite: found before the optimiser step, on all ranks alike, and traced to a row.

C completions, N scored tokens of a microbatch.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from tiercel.distributed.ranks import Ranks
from tiercel.errors import NonFiniteError, TrainingError
from tiercel.learner.batch import AdvantageGroup, PolicyBatch
from tiercel.reliability.fault_plan import spoil

if TYPE_CHECKING:
    from tiercel.training.update import Engine


@dataclass(slots=True)
class Trace:
    """What an update went through on this rank, to name rows by."""

    rows: list[str] = field(default_factory=list)
    faulty: list[str] = field(default_factory=list)  # whose loss is not finite
    # Rows of each microbatch, and the size of the gradient after it, of no use but where the last is not finite.
    sizes: list[tuple[tuple[str, ...], Tensor | None]] = field(default_factory=list)

    def rows_at_fault(self, *, of_loss: bool) -> list[str]:
        """Of the loss, or else of the gradient: those after which it was not finite, or all where nobody knows."""
        if of_loss:
            return list(dict.fromkeys(self.faulty))
        known = [(rows, float(size)) for rows, size in self.sizes if size is not None]
        spoilt = next((list(rows) for rows, size in known if not math.isfinite(size)), [])
        return spoilt if known else list(dict.fromkeys(self.rows))


def non_finite(engine: "Engine", loss: float, norm: float, trace: Trace) -> NonFiniteError:
    """The error for all ranks, who call this together; the loss and the norm are those of all."""
    of_loss = not math.isfinite(loss)
    rows = engine.ranks.gather(trace.rows_at_fault(of_loss=of_loss))
    if not any(rows):
        rows = engine.ranks.gather(list(dict.fromkeys(trace.rows)))
    what = f"the loss is {loss}" if of_loss else f"the gradient norm is {norm}"
    spoilt = engine.ranks.gather(spoilt_weight(engine.policy.trained_parameters()))
    if (name := next(filter(None, spoilt), None)) is not None:
        rank = spoilt.index(name)
        what = f"the trained weight {name} is not finite" + (f" on rank {rank}" if engine.ranks.world_size > 1 else "")
        what += ", so the loss is not either,"
    return NonFiniteError(what, rows)


def require_finite_advantages(ranks: Ranks, groups: Sequence[AdvantageGroup]) -> list[AdvantageGroup]:
    """The groups. Raises NonFiniteError, on all ranks, where one of theirs has an advantage that is not finite."""
    step = ranks.pulse.doing.step
    groups = [replace(group, advantages_G=spoil(group.advantages_G, "advantage", step, ranks.rank)) for group in groups]
    faulty = [group.item.prompt.row.id for group in groups if not bool(torch.isfinite(group.advantages_G).all())]
    rows = ranks.gather(faulty)
    if any(rows):
        raise NonFiniteError("an advantage is not finite", rows)
    return groups


def faulty_rows(batch: PolicyBatch, logprobs_N: Tensor) -> tuple[str, ...]:
    """Rows with a completion whose logprobs or advantage are not finite; all of the microbatch where none has."""
    bad_C = ~torch.isfinite(batch.advantages_C)
    bad_C[batch.packed.continuation_of_N[~torch.isfinite(logprobs_N.cpu())]] = True
    found = [row for row, is_bad in zip(batch.row_of_C, bad_C.tolist(), strict=False) if is_bad]
    return tuple(dict.fromkeys(found)) or batch.prompt_ids


def gradient_size(parameters: Iterable[nn.Parameter]) -> Tensor | None:
    """Norm of this rank's gradients so far, not waited for; None where a strategy keeps them elsewhere or in parts."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients or any(type(gradient) is not Tensor for gradient in gradients):
        return None
    return nn.utils.get_total_norm(gradients)


def spoilt_weight(parameters: dict[str, nn.Parameter]) -> str | None:
    """The first parameter, or this rank's part of it, that holds a number that is not finite."""
    for name, parameter in parameters.items():
        if not bool(torch.isfinite(local_part(parameter)).all()):
            return name
    return None


def require_finite_weights(weights: Mapping[str, Tensor], step: int) -> None:
    """Raises TrainingError: such weights are not worth a checkpoint, which the next start would go on from."""
    name = next((name for name, weight in weights.items() if not bool(torch.isfinite(weight).all())), None)
    if name is not None:
        raise TrainingError(
            f"the trained weight {name} is not finite after step {step}, so no checkpoint was written; lower optim.lr; "
            "the same command goes on from the newest checkpoint"
        )


def local_part(parameter: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter.detach()


def planned_spoiling(engine: "Engine", value: Tensor, site: str) -> Tensor:
    """The value, but where a fault plan says otherwise."""
    return spoil(value, site, engine.ranks.pulse.doing.step, engine.ranks.rank)


def spoil_weights(engine: "Engine") -> None:
    """Nothing, but where a fault plan says otherwise."""
    factor = spoil(1.0, "weights", engine.ranks.pulse.doing.step, engine.ranks.rank)
    if factor != 1.0:
        next(iter(engine.policy.trained_parameters().values())).data.mul_(factor)
