"""How long a run is, and what happens after which of its steps."""

from dataclasses import dataclass

from tiercel.config.schema import BaseRecipe, Optim
from tiercel.data.order import prompts_of_epochs, steps_of_epochs
from tiercel.errors import RecipeError
from tiercel.runs.checkpoints import FoundCheckpoint
from tiercel.runs.directory import RunDirectory
from tiercel.runs.json_lines import Rows
from tiercel.training.schedule import decay_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLength:
    """How long the run is: its steps, and the global index before which it stops (None: only the steps end it)."""

    steps: int
    end: int | None


def is_due(step: int, every: int | None, length: RunLength) -> bool:
    """Return whether something that happens every so many steps, and after the last, happens after this one."""
    return step == length.steps or (every is not None and step < length.steps and step % every == 0)


def lacks_evaluation(recipe: BaseRecipe, run: RunDirectory, length: RunLength, found: FoundCheckpoint | None) -> bool:
    """Return whether the evaluation before the next step is still to be made: that of a new run, or one that a stop or
    an error ended, so that the row of its step lacks it."""
    if found is None:
        return True
    is_evaluated = recipe.data.eval is not None and is_due(found.step, recipe.train.eval_every, length)
    newest = Rows(run.metrics_file).newest(1) if is_evaluated else []
    return any(row.get("step") == found.step and not any(key.startswith("eval/") for key in row) for row in newest)


def require_schedule(optim: Optim, last: int) -> None:
    """Raise RecipeError if the learning rate would still rise at the end of a new run, whose length epochs may decide,
    or if it would fall before it has risen."""
    if optim.warmup_steps > last:
        raise RecipeError(
            [
                f"optim.warmup_steps: is {optim.warmup_steps}, but the run has only {last} steps, so optim.lr would "
                "never be reached; use fewer warmup steps"
            ]
        )
    room = last - optim.warmup_steps
    if optim.schedule == "wsd" and (decay := decay_steps(optim, last)) > room:
        raise RecipeError(
            [
                f"optim.decay_steps: is {decay}, but the run's {last} steps minus optim.warmup_steps "
                f"({optim.warmup_steps}) leave {room}; use at most that many, or the rate would fall before it has "
                "risen"
            ]
        )


def run_length(recipe: BaseRecipe, row_count: int) -> RunLength:
    """Compute the length from the given steps, or from the epochs."""
    if recipe.train.steps is not None:
        return RunLength(steps=recipe.train.steps, end=None)
    assert recipe.train.epochs is not None
    size = recipe.optim.prompts_per_step
    return RunLength(
        steps=steps_of_epochs(recipe.train.epochs, row_count, size),
        end=prompts_of_epochs(recipe.train.epochs, row_count),
    )
