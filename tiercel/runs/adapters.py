"""Resolution of `lora.init` if it names a run: the adapter of that run's newest valid checkpoint, chosen once.

The adapter is also the KL reference. So a resumed run keeps the adapter that it started with, however far the other
run has trained since. Imports no torch.
"""

import sys
from functools import partial
from pathlib import Path
from typing import TypeVar

from tiercel.config.schema import BaseRecipe, Lora
from tiercel.errors import RecipeError, RunError
from tiercel.runs.checkpoints import newest_valid
from tiercel.runs.fresh_start import has_no_step
from tiercel.runs.recipe import is_run, load_run_recipe

AnyRecipe = TypeVar("AnyRecipe", bound=BaseRecipe)
_tell = partial(print, file=sys.stderr)


def starting_adapter(recipe: AnyRecipe) -> AnyRecipe:
    """Return the recipe with an adapter's directory as lora.init if lora.init names a run. Raises RecipeError if that
    run has no adapter."""
    lora = recipe.lora
    if lora is None or lora.init is None or not is_run(Path(lora.init)):
        return recipe
    run = Path(lora.init)
    adapter = _kept(recipe, run) or _newest(run)
    _tell(f"lora.init: {run} is a run; its adapter of {adapter.parent.name} is taken")
    return recipe.with_values({"lora.init": str(adapter)})


def _kept(recipe: BaseRecipe, run: Path) -> Path | None:
    """Return the adapter of `run` that the recipe's own run started with, or None if it has not started."""
    output = Path(recipe.output)
    if not is_run(output) or has_no_step(output):
        return None
    try:
        before: Lora | None = load_run_recipe(output).lora
    except (RecipeError, RunError):
        return None  # whoever opens that run reports what is wrong with it
    kept = None if before is None or before.init is None else Path(before.init)
    return kept if kept is not None and (run / "checkpoints").resolve() in kept.resolve().parents else None


def _newest(run: Path) -> Path:
    found = newest_valid(run / "checkpoints", _tell)
    if found is None:
        raise RecipeError([f"lora.init: {run} is a run without a valid checkpoint yet; use an adapter's directory"])
    adapter = found.path / "adapter"
    if not adapter.is_dir():
        raise RecipeError(
            [
                f"lora.init: {run} is a full fine-tuning run, which has no adapter; `tiercel export {run} --merge` "
                "writes its model: set model.path to that and remove lora.init"
            ]
        )
    return adapter
