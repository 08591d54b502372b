"""The weights that a run has trained: those of its newest checkpoint, of a step, or of its best evaluation."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from tiercel.config import Recipe
from tiercel.config.schema import BaseRecipe
from tiercel.errors import RunError
from tiercel.runs.checkpoints import FoundCheckpoint, list_checkpoints, newest_valid, of_step
from tiercel.runs.directory import read_metrics
from tiercel.runs.records import finite
from tiercel.training.checkpoints import LOWEST_IS_BEST, OBJECTIVE
from tiercel.web.report.verdict import HELD_OUT


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointChoice:
    """The choice of a run's checkpoint: the newest if neither field is set."""

    step: int | None = None
    is_best: bool = False


NEWEST = CheckpointChoice()


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """Where a run's weights are, and what its loss remembers from earlier steps."""

    model: str
    adapter: Path | None
    state: Mapping[str, Any]


def trained_weights(run: Path, recipe: BaseRecipe, choice: CheckpointChoice = NEWEST) -> Trained:
    """Find the weights of a run. Raises RunError if it has no such checkpoint."""
    found = _found(run, recipe, choice)
    state = found.state.get(OBJECTIVE, {})
    if recipe.lora is None:
        return Trained(model=str(found.path / "model"), adapter=None, state=state)
    return Trained(model=recipe.model.path, adapter=found.path / "adapter", state=state)


def with_weights(recipe: Recipe, trained: Trained) -> Recipe:
    """Return the recipe with the path of the model that the weights belong to."""
    return recipe.with_values({"model.path": trained.model})


def _found(run: Path, recipe: BaseRecipe, choice: CheckpointChoice) -> FoundCheckpoint:
    folder = run / "checkpoints"
    if choice.is_best:
        metric, step, value = best_checkpoint(run, recipe)
        print(f"the best of the checkpoints is that of step {step}: {metric} {value:.4f}", file=sys.stderr)
        return of_step(folder, step)
    if choice.step is not None:
        return of_step(folder, choice.step)
    found = newest_valid(folder, print)
    if found is None:
        raise RunError(f"{run} has no valid checkpoint yet")
    return found


def best_checkpoint(run: Path, recipe: BaseRecipe) -> tuple[str, int, float]:
    """Return the metric, the step and the value of the best evaluation that has a checkpoint, the earliest if several
    are equal. The metric is that of train.keep_best, or else the first that was recorded. Raises RunError."""
    steps = {step for step, _ in list_checkpoints(run / "checkpoints")}
    rows = [row for row in read_metrics(run) if row["step"] in steps]
    for metric in [recipe.train.keep_best] if recipe.train.keep_best else HELD_OUT:
        scored = [(row["step"], value) for row in rows if (value := finite(row.get(metric))) is not None]
        if scored:
            best = min if metric in LOWEST_IS_BEST else max  # both return the first of equals
            return metric, *best(scored, key=itemgetter(1))
    raise RunError(
        f"--best: no checkpoint of {run} was evaluated; name one with --checkpoint N, and for the next run set "
        "data.eval and train.keep_best"
    )
