"""Numbers that are not finite: found before the optimiser step, on all ranks alike, and traced to a row. What such an
update was computed from is kept. The run then ends, or skips a limited number of such updates.

C completions, N scored tokens of a microbatch.
"""

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tiercel.algorithms import LossInput, policy_loss
from tiercel.algorithms.section import Algorithm
from tiercel.config.schema import BaseRecipe
from tiercel.errors import NonFiniteError, TrainingError
from tiercel.log import logger
from tiercel.models.weights.saving import save_adapter
from tiercel.packing.batch import PolicyBatch
from tiercel.regular_files import make_directory, open_new, open_regular, remove
from tiercel.reliability.redaction import redact_values
from tiercel.runs.directory import RunDirectory
from tiercel.runs.files import write_atomically
from tiercel.training.trainer import Trainer

FOLDER = "nonfinite"
KEPT_NAME = re.compile(r"step-(\d{6,})(?:-(\d+))?")
REPORT = "report.json"
KEPT_GROUPS = "groups.jsonl"  # for people; a replay reads MICROBATCHES
MICROBATCHES = "microbatches-{rank:03d}.safetensors"
OF_TOKENS = ("logprobs_N", "old_logprobs_N", "kl_N", "entropy_N", "teacher_N", "weights_N")  # fields of LossInput
T = TypeVar("T")
SerializeMicrobatches = Callable[[Sequence[int] | None], bytes]  # takes numbers of microbatches; None: all


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedMicrobatch:
    """What a microbatch leaves behind in case the update is not finite."""

    row_ids: tuple[str, ...]
    loss: Tensor  # detached
    faulty_rows: Callable[[], tuple[str, ...]]  # the rows at fault if the loss is not finite
    size: Tensor | None  # of this rank's gradient after it; None if unknown


@dataclass(slots=True)
class UpdateTrace:
    """What an update computed on this rank, to find the rows at fault. It is read only if the update is not finite."""

    parts: list[TracedMicrobatch] = field(default_factory=list)

    @property
    def rows(self) -> list[str]:
        return list(dict.fromkeys(row for part in self.parts for row in part.row_ids))

    @property
    def places(self) -> tuple[int, ...]:
        """Return the numbers of all microbatches."""
        return tuple(range(len(self.parts)))

    def places_at_fault(self, *, of_loss: bool) -> tuple[int, ...]:
        """Return the numbers of the microbatches after which the loss, or otherwise the gradient, was not finite; all
        of them if that is not known."""
        if of_loss:
            return tuple(place for place, part in enumerate(self.parts) if not math.isfinite(float(part.loss)))
        known = [(place, float(part.size)) for place, part in enumerate(self.parts) if part.size is not None]
        first = next(((place,) for place, size in known if not math.isfinite(size)), ())
        return first if known else self.places

    def rows_of(self, places: Iterable[int], *, of_loss: bool) -> list[str]:
        """List the rows of microbatches; if the loss is not finite, only the rows that make it so."""
        parts = [self.parts[place] for place in places]
        found = [part.faulty_rows() if of_loss else part.row_ids for part in parts]
        return list(dict.fromkeys(row for rows in found for row in rows))


def non_finite(trainer: Trainer, loss: float, norm: float, trace: UpdateTrace) -> NonFiniteError:
    """Make the error on all ranks, which call this together. `loss` and `norm` are over all ranks."""
    of_loss = not math.isfinite(loss)
    places = trace.places_at_fault(of_loss=of_loss)
    rows = trainer.ranks.all_gather(trace.rows_of(places, of_loss=of_loss))
    if not any(rows):
        places, rows = trace.places, trainer.ranks.all_gather(trace.rows)
    what = f"the loss is {loss}" if of_loss else f"the gradient norm is {norm}"
    spoilt = trainer.ranks.all_gather(spoilt_weight(trainer.policy.trained_parameters()))
    if (name := next(filter(None, spoilt), None)) is not None:
        rank = spoilt.index(name)
        where = f" on rank {rank}" if trainer.ranks.world_size > 1 else ""
        what = f"the trained weight {name} is not finite{where}, so neither is the loss,"
    return NonFiniteError(what, rows, places=places)


def faulty_rows(batch: PolicyBatch, given: LossInput, algorithm: Algorithm) -> tuple[str, ...]:
    """Return the rows whose own part of the loss is not finite, or all rows of the microbatch if no row alone is at
    fault."""
    found = []
    for row in dict.fromkeys(batch.prompt_ids):
        chosen_C = torch.tensor([name.row == row for name in batch.names_C], device=given.advantages_C.device)
        if not math.isfinite(float(policy_loss(_of_completions(given, chosen_C), algorithm).loss)):
            found.append(row)
    return tuple(found) or batch.prompt_ids


def faulty_examples(rows: tuple[str, ...], losses_B: Tensor | None) -> tuple[str, ...]:
    """Return the rows whose own loss is not finite; all of them if no row alone is at fault, or if the loss is over
    tokens."""
    if losses_B is None:
        return rows
    return tuple(row for row, loss in zip(rows, losses_B.tolist(), strict=True) if not math.isfinite(loss)) or rows


def without_graph(given: LossInput) -> LossInput:
    """Detach the inputs of a loss, so that they can be kept beyond the backward pass."""
    tensors = {name: value.detach() for name in OF_TOKENS if (value := getattr(given, name)) is not None}
    return replace(given, **tensors)


def _of_completions(given: LossInput, chosen_C: Tensor) -> LossInput:
    chosen_N = chosen_C[given.completion_of_N]
    numbers_C = chosen_C.long().cumsum(0) - 1
    return replace(
        given,
        advantages_C=given.advantages_C[chosen_C],
        completion_of_N=numbers_C[given.completion_of_N[chosen_N]],
        **{name: value[chosen_N] for name in OF_TOKENS if (value := getattr(given, name)) is not None},
    )


def gradient_size(parameters: Iterable[nn.Parameter]) -> Tensor | None:
    """Return the norm of this rank's gradients so far, without waiting for it; None if the strategy keeps them
    elsewhere or in parts."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients or any(isinstance(gradient, DTensor) for gradient in gradients):
        return None
    return nn.utils.get_total_norm(gradients)


def spoilt_weight(parameters: dict[str, nn.Parameter]) -> str | None:
    """Return the name of the first parameter with a non-finite number in the part that this rank holds, or None."""
    for name, parameter in parameters.items():
        if not bool(torch.isfinite(local_part(parameter)).all()):
            return name
    return None


def require_finite_weights(weights: Mapping[str, Tensor], step: int) -> None:
    """Raise TrainingError if a weight is not finite, because the next start must not resume from such a checkpoint."""
    name = next((name for name, weight in weights.items() if not bool(torch.isfinite(weight).all())), None)
    if name is not None:
        raise TrainingError(
            f"the trained weight {name} is not finite after step {step}, so no checkpoint was written; lower optim.lr; "
            "run the same command again to resume from the newest checkpoint"
        )


def local_part(parameter: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter.detach()


def nonfinite_directory(run: Path, step: int, number: int) -> Path:
    """Return the folder of the step's `number`-th update that was not finite, counted from 1."""
    return run / FOLDER / (f"step-{step:06d}" + (f"-{number}" if number > 1 else ""))


def nonfinite_directories(run: Path, step: int | None) -> list[Path]:
    """List the folders of a step, or of every step if it is None, in order."""
    found = ((KEPT_NAME.fullmatch(directory.name), directory) for directory in (run / FOLDER).glob("step-*"))
    numbered = [((int(name[1]), int(name[2] or 1)), directory) for name, directory in found if name is not None]
    return [directory for numbers, directory in sorted(numbered) if step in (None, numbers[0])]


def copy_rollouts(directory: Path, rollouts: Path) -> None:
    """Copy a step's groups from rollouts/, because the next start of the run truncates rollouts/."""
    with open_regular(rollouts) as source, open_new(directory / KEPT_GROUPS, "wb") as kept:
        shutil.copyfileobj(source, kept)


class FiniteGuard:
    """A guard that skips updates that are not finite, up to reliability.max_skipped_updates in a start of the run;
    `skipped_updates` counts them. All ranks call it together."""

    def __init__(self, run: RunDirectory, recipe: BaseRecipe):
        self.skipped_updates = 0
        self._run = run
        self._recipe = recipe
        self._kept: Counter[int] = Counter()  # by step, which may have several updates

    def attempt(
        self,
        trainer: Trainer,
        update: Callable[[], T],
        kept: SerializeMicrobatches,
        keep: Callable[[Path], None] = lambda directory: None,
    ) -> T | None:
        """Make the update; None if it is skipped. `kept` returns the microbatches at fault on this rank as a file's
        bytes; `keep` writes, on the first rank, what else is to be kept. Raises NonFiniteError if no more updates may
        be skipped."""
        step = trainer.ranks.heartbeat.activity.step + 1  # counted from 1, as in the names of other files
        try:
            return update()
        except NonFiniteError as error:
            again = self._keep(trainer, step, error, kept, keep)
            if self.skipped_updates >= self._recipe.reliability.max_skipped_updates:
                raise NonFiniteError(error.what, error.rows, again) from error
            self.skipped_updates += 1
            trainer.strategy.discard_gradients()
            logger.warning(f"step {step}: an update was skipped ({self.skipped_updates} so far): {error.what}; {again}")
            return None

    def _keep(
        self,
        trainer: Trainer,
        step: int,
        error: NonFiniteError,
        kept: SerializeMicrobatches,
        keep: Callable[[Path], None],
    ) -> str:
        """Keep what the update was computed from, and return what the user can do. A full disk must not hide why the
        run ends."""
        self._kept[step] += 1
        directory = nonfinite_directory(self._run.path, step, self._kept[step])
        weights = trainer.strategy.trained_weights() if self._recipe.lora is not None else {}
        files = trainer.ranks.gather_on_first(kept(error.places) if trainer.is_counted else b"")
        report = {"step": step, "steps_before": step - 1, "what": error.what, "rows": error.rows}
        report |= {"world_size": trainer.ranks.world_size}

        def write() -> str:
            try:
                if self._kept[step] == 1:
                    for old in nonfinite_directories(self._run.path, step):  # of an earlier start of the run
                        remove(old)
                make_directory(directory.parent)
                make_directory(directory)
                if self._recipe.lora is not None:
                    save_adapter(trainer.policy, directory / "adapter", weights)
                for rank, content in enumerate(files):
                    if content:
                        with open_new(directory / MICROBATCHES.format(rank=rank), "wb") as file:
                            file.write(content)
                keep(directory)
                write_atomically(directory / REPORT, json.dumps(redact_values(report), indent=1))
            except (OSError, SafetensorError) as problem:
                return f"it could not be kept in {directory} for a replay: {problem}"
            return f"`tiercel replay {self._run.path}` computes it again, row by row, from {directory}"

        return trainer.ranks.run_on_first(write)
