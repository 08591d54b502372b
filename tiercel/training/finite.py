"""Numbers that are not finite: found before the optimiser step, on all ranks alike, and traced to a row. What such an
update was computed from is kept, and the run ends, or leaves a few such updates out.

C completions, N scored tokens of a microbatch.
"""

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tiercel.config.schema import BaseRecipe
from tiercel.errors import NonFiniteError, TrainingError
from tiercel.learner.batch import PolicyBatch
from tiercel.models.saving import save_adapter
from tiercel.reliability.redaction import redact_values
from tiercel.runs.directory import RunDirectory
from tiercel.runs.files import write_atomically
from tiercel.training.trainer import Trainer

FOLDER = "nonfinite"
KEPT_NAME = re.compile(r"step-(\d{6,})(?:-(\d+))?")
REPORT = "report.json"
KEPT_GROUPS = "groups.jsonl"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedPart:
    """What a microbatch leaves behind for the case that the update is not finite."""

    row_ids: tuple[str, ...]
    loss: Tensor  # detached
    faulty_rows: Callable[[], tuple[str, ...]]  # those at fault where the loss is not finite
    size: Tensor | None  # of this rank's gradient after it; None where it is not known


@dataclass(slots=True)
class Trace:
    """What an update computed on this rank, from which the rows at fault are found. Nothing of it is read before."""

    parts: list[TracedPart] = field(default_factory=list)

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(row for part in self.parts for row in part.row_ids))

    def rows_at_fault(self, *, of_loss: bool) -> list[str]:
        """List the rows after which the loss, or else the gradient, was not finite; all rows where that is not
        known."""
        if of_loss:
            found = [part.faulty_rows() for part in self.parts if not math.isfinite(float(part.loss))]
            return list(dict.fromkeys(row for rows in found for row in rows))
        known = [(part.row_ids, float(part.size)) for part in self.parts if part.size is not None]
        spoilt = next((list(rows) for rows, size in known if not math.isfinite(size)), [])
        return spoilt if known else self.rows


def non_finite(trainer: Trainer, loss: float, norm: float, trace: Trace) -> NonFiniteError:
    """Make the error for all ranks, which call this together. The loss and the norm are those of all ranks."""
    of_loss = not math.isfinite(loss)
    rows = trainer.ranks.gather(trace.rows_at_fault(of_loss=of_loss))
    if not any(rows):
        rows = trainer.ranks.gather(trace.rows)
    what = f"the loss is {loss}" if of_loss else f"the gradient norm is {norm}"
    spoilt = trainer.ranks.gather(spoilt_weight(trainer.policy.trained_parameters()))
    if (name := next(filter(None, spoilt), None)) is not None:
        rank = spoilt.index(name)
        where = f" on rank {rank}" if trainer.ranks.world_size > 1 else ""
        what = f"the trained weight {name} is not finite{where}, so the loss is not either,"
    return NonFiniteError(what, rows)


def faulty_rows(batch: PolicyBatch, logprobs_N: Tensor) -> tuple[str, ...]:
    """Rows with a completion whose logprobs or advantage are not finite; all of the microbatch where none has."""
    bad_C = ~torch.isfinite(batch.advantages_C)
    bad_C[batch.packed.continuation_of_N[~torch.isfinite(logprobs_N.cpu())]] = True
    found = [name.row for name, is_bad in zip(batch.names_C, bad_C.tolist(), strict=False) if is_bad]
    return tuple(dict.fromkeys(found)) or batch.prompt_ids


def gradient_size(parameters: Iterable[nn.Parameter]) -> Tensor | None:
    """Norm of this rank's gradients so far, not waited for; None where a strategy keeps them elsewhere or in parts."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients or any(isinstance(gradient, DTensor) for gradient in gradients):
        return None
    return nn.utils.get_total_norm(gradients)


def spoilt_weight(parameters: dict[str, nn.Parameter]) -> str | None:
    """Find the first parameter with a number that is not finite, in the part that this rank holds."""
    for name, parameter in parameters.items():
        if not bool(torch.isfinite(local_part(parameter)).all()):
            return name
    return None


def require_finite_weights(weights: Mapping[str, Tensor], step: int) -> None:
    """Raise TrainingError where a weight is not finite: the next start must not go on from such a checkpoint."""
    name = next((name for name, weight in weights.items() if not bool(torch.isfinite(weight).all())), None)
    if name is not None:
        raise TrainingError(
            f"the trained weight {name} is not finite after step {step}, so no checkpoint was written; lower optim.lr; "
            "the same command goes on from the newest checkpoint"
        )


def local_part(parameter: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter.detach()


def kept_name(run: Path, step: int, number: int) -> Path:
    """Return the folder of the step's `number`-th update that was not finite, counted from 1."""
    return run / FOLDER / (f"step-{step:06d}" + (f"-{number}" if number > 1 else ""))


def kept_of_step(run: Path, step: int | None) -> list[Path]:
    """List the folders of a step, or of every step where None, in their order."""
    found = ((KEPT_NAME.fullmatch(directory.name), directory) for directory in (run / FOLDER).glob("step-*"))
    numbered = [((int(name[1]), int(name[2] or 1)), directory) for name, directory in found if name is not None]
    return [directory for numbers, directory in sorted(numbered) if step in (None, numbers[0])]


def keep_groups(directory: Path, rollouts: Path) -> None:
    """Copy a step's groups, as rollouts/ has them: the next start of the run cuts rollouts/ off."""
    shutil.copyfile(rollouts, directory / KEPT_GROUPS)


class FiniteGuard:
    """Leaves out updates that are not finite, up to reliability.max_skipped_updates in a start of the run; `left_out`
    counts them. All ranks call it together."""

    def __init__(self, run: RunDirectory, recipe: BaseRecipe, say: Callable[[str], None]):
        self.left_out = 0
        self._run = run
        self._recipe = recipe
        self._say = say
        self._kept: Counter[int] = Counter()  # by step, which may have several updates

    def attempt(
        self, trainer: Trainer, update: Callable[[], T], keep: Callable[[Path], None] = lambda directory: None
    ) -> T | None:
        """Make the update; None where it is left out. `keep` writes, on the first rank, what its rows, its weights and
        its step do not tell. Raises NonFiniteError."""
        step = trainer.ranks.pulse.doing.step
        try:
            return update()
        except NonFiniteError as error:
            again = self._keep(trainer, step, error, keep)
            if self.left_out >= self._recipe.reliability.max_skipped_updates:
                raise NonFiniteError(error.what, error.rows, again) from error
            self.left_out += 1
            trainer.strategy.leave_out()
            self._say(f"step {step + 1}: an update was left out ({self.left_out} so far): {error.what}; {again}")
            return None

    def _keep(self, trainer: Trainer, step: int, error: NonFiniteError, keep: Callable[[Path], None]) -> str:
        """Keep what the update was computed from; return what the user can do. A full disk must not hide why the run
        ends."""
        self._kept[step] += 1
        directory = kept_name(self._run.path, step, self._kept[step])
        weights = trainer.strategy.trained_weights() if self._recipe.lora is not None else {}
        report = {"step": step, "what": error.what, "rows": error.rows, "world_size": trainer.ranks.world_size}

        def write() -> str:
            try:
                if self._kept[step] == 1:
                    for old in kept_of_step(self._run.path, step):  # of an earlier start of the run
                        shutil.rmtree(old)
                directory.mkdir(parents=True, exist_ok=True)
                if self._recipe.lora is not None:
                    save_adapter(trainer.policy, directory / "adapter", weights)
                keep(directory)
                write_atomically(directory / REPORT, json.dumps(redact_values(report), indent=1))
            except (OSError, SafetensorError) as problem:
                return f"it could not be kept in {directory} for a replay: {problem}"
            return f"`tiercel replay {self._run.path}` computes it again, row by row, from {directory}"

        return trainer.ranks.on_first(write)
