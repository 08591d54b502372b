"""`tiercel replay`: an update that was not finite, recomputed row by row to find the row and the layer at fault."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tiercel.config import GrpoRecipe, OfflineRecipe, Recipe
from tiercel.data.encoding import ExampleEncoder
from tiercel.data.order import indices_of_step
from tiercel.data.reading import read_training_rows
from tiercel.errors import DataError, RunError
from tiercel.log import logger
from tiercel.models.weights.saving import restore_adapter
from tiercel.packing.examples import example_groups
from tiercel.regular_files import read_json
from tiercel.runs.checkpoints import newest_valid
from tiercel.runs.directory import RunDirectory
from tiercel.training.grpo.policy_update import policy_microbatch_losses
from tiercel.training.nonfinite_batches import KeptPlan, load_saved_update
from tiercel.training.nonfinite_guard import REPORT, gradient_size, nonfinite_directories, spoilt_weight
from tiercel.training.offline.example_loss import example_microbatch_losses
from tiercel.training.offline.objectives import objective_of
from tiercel.training.optimizer_step import MicrobatchLoss
from tiercel.training.run_length import run_length
from tiercel.training.session import set_up_numerics
from tiercel.training.strategy_choice import read_token_budget
from tiercel.training.trainer import Trainer, build_trainer
from tiercel.types import EncodedImage, Example
from tiercel.writing import NOT_OURS, reading


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayCase:
    """What one or several rows add to the update."""

    rows: tuple[str, ...]
    images_of_passes: Sequence[Sequence[EncodedImage]]
    losses: Iterator[MicrobatchLoss]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Loss and gradient of a row by itself, or of a microbatch of several rows."""

    rows: tuple[str, ...]
    loss: float
    gradient_norm: float
    module: str | None  # the first whose output was not finite

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)

    @property
    def line(self) -> str:
        where = f"; the first output that is not finite comes from {self.module}" if self.module else ""
        loss, size = f"{self.loss:.6g}", f"{self.gradient_norm:.6g}"
        if len(self.rows) > 1:
            return f"rows {', '.join(self.rows)} together: loss {loss}, gradient norm {size}{where}"
        return f"row {self.rows[0]}: loss {loss}, gradient norm {size}{where}"


def find_nonfinite_directory(run: Path, step: int | None) -> Path:
    """Return the directory of what was kept of this step, or of the last step that was not finite. Raises RunError if
    nothing was kept."""
    kept = [directory for directory in nonfinite_directories(run, step) if (directory / REPORT).is_file()]
    if not kept:
        of_step = "" if step is None else f" in step {step}"
        raise RunError(f"{run} has no saved update that was not finite{of_step}, so there is nothing to replay")
    return kept[-1]


def replay(recipe: Recipe, run: Path, directory: Path) -> list[Finding]:
    """Recompute the update, forward and backward, in one process: its microbatches that were not finite, and each of
    their rows by itself. No weight is changed."""
    set_up_numerics(recipe)
    found = newest_valid(run / "checkpoints", logger.warning) if recipe.lora is None else None
    if recipe.lora is None:
        logger.info(f"full fine-tuning does not save the weights; those of step {found.step if found else 0} are used")
    # Compiled layers have no modules to hook into.
    recipe = recipe.with_values({"learner.compile": False})
    trainer = build_trainer(recipe, found, tokens=read_token_budget(recipe, RunDirectory(path=run)))
    if recipe.lora is not None:
        restore_adapter(trainer.policy, directory / "adapter")
    if (name := spoilt_weight(trainer.policy.trained_parameters())) is not None:
        logger.warning(
            f"the trained weight {name} is not finite itself: go on from an earlier checkpoint, with a lower optim.lr"
        )
    if isinstance(recipe, GrpoRecipe):
        passes = _policy_passes(trainer, recipe, directory)
    else:
        passes = _example_passes(trainer, recipe, directory)
    findings = []
    for each in passes:
        findings.append(_finding(trainer, each))
        logger.info(findings[-1].line)
    return findings


def _finding(trainer: Trainer, each: ReplayCase) -> Finding:
    loss, strategy = 0.0, trainer.strategy
    strategy.zero_gradients()
    update = trainer.vision.update(each.images_of_passes)
    with first_non_finite(trainer.policy.model) as modules, trainer.training_mode(), update:
        for part in each.losses:
            loss += float(part.loss.detach())
            part.loss.backward()
        trainer.vision.backward()
    trainer.vision.end_step()
    size = gradient_size(trainer.policy.trained_parameters().values())
    norm = 0.0 if size is None else float(size)
    return Finding(rows=each.rows, loss=loss, gradient_norm=norm, module=modules[0] if modules else None)


def rows_at_fault(findings: Sequence[Finding]) -> list[str]:
    """List the rows that are not finite by themselves, or, if there are none, the rows that are so only together."""
    faulty = [each.rows for each in findings if not each.is_finite]
    alone = [rows for rows in faulty if len(rows) == 1]
    return list(dict.fromkeys(row for rows in alone or faulty for row in rows))


@contextmanager
def first_non_finite(model: nn.Module) -> Iterator[list[str]]:
    """Collect, inside the context, the names of the modules whose output was not finite, in the order in which they
    finished."""
    names: list[str] = []

    def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            tensors = output if isinstance(output, tuple | list) else [output]
            if any(isinstance(t, Tensor) and t.is_floating_point() and not bool(t.isfinite().all()) for t in tensors):
                names.append(name)

        return hook

    handles = [module.register_forward_hook(look(name)) for name, module in model.named_modules() if name]
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()


def _policy_passes(trainer: Trainer, recipe: GrpoRecipe, directory: Path) -> Iterator[ReplayCase]:
    """Yield each microbatch as it was, then each of its rows by itself."""
    for kept in load_saved_update(directory, trainer.policy.device):
        alone = [((row,), each) for row, each in kept.of_rows()]
        together = [(tuple(row for (row,), _ in alone), kept)] if len(alone) > 1 else []
        for rows, each in (*together, *alone):
            yield ReplayCase(
                rows=rows,
                images_of_passes=each.unit.images_of_passes,
                losses=policy_microbatch_losses(trainer, each.unit, each.known, recipe),
            )


def _example_passes(trainer: Trainer, recipe: OfflineRecipe, directory: Path) -> Iterator[ReplayCase]:
    """Encode the step's rows again, which follow from its number. What the loss knew of them was kept."""
    with reading(directory):
        report = read_json(directory / REPORT)
    # Older versions counted the step from 0, and had no other key.
    if not isinstance(report, dict) or type(step := report.get("steps_before", report.get("step"))) is not int:
        raise RunError(f"{directory / REPORT} does not say its step; {NOT_OURS}")
    table = read_training_rows(recipe.data, recipe.purpose)
    order = table.order(recipe.train.seed, recipe.data)
    encode = ExampleEncoder(recipe=recipe, family=trainer.policy.family, rows=table.rows, order=order)
    examples: list[Example] = []
    for index in indices_of_step(step, recipe.optim.prompts_per_step, run_length(recipe, len(table.rows)).end):
        with suppress(DataError):  # a row that was rejected then is rejected again
            examples.append(encode(table.rows[order.row(index)], index))
    objective = objective_of(recipe)
    kept: list[KeptPlan] = load_saved_update(directory, trainer.policy.device)
    objective.state.update(kept[0].state)
    known = {index: sums for each in kept for index, sums in each.known.items()}
    matched = {index: values for each in kept for index, values in each.matched_values.items()}
    inputs = replace(
        objective.prepare(trainer, example_groups(examples, trainer.sharing_family), known),
        examples=kept[0].examples,
        tokens=kept[0].tokens,
        first_tokens=kept[0].first_tokens,
        divergence=kept[0].divergence,
        matched=matched,
    )
    for group in inputs.groups:
        for unit in trainer.example_units([group]):
            yield ReplayCase(
                rows=unit.batches[0].prompt_ids,
                images_of_passes=unit.images_of_passes,
                losses=example_microbatch_losses(trainer, objective, unit, inputs),
            )
