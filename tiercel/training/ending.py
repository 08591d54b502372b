"""What every training command does around its loop: the run directory, memory errors in plain words, the report."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from tiercel.config import GrpoRecipe, SftRecipe
from tiercel.errors import TrainingError
from tiercel.report import write_report
from tiercel.runs.directory import RunDirectory, open_run

AnyRecipe = TypeVar("AnyRecipe", SftRecipe, GrpoRecipe)


def run_recipe(train: Callable[[AnyRecipe, RunDirectory], None], recipe: AnyRecipe) -> Path:
    """Train in the recipe's run directory, write its report.html and return its path. Raises TrainingError where
    memory runs out."""
    with open_run(recipe) as run:
        try:
            train(recipe, run)
        except torch.OutOfMemoryError as error:
            raise TrainingError(
                f"out of memory: {str(error).splitlines()[0]}\nlower learner.max_tokens_per_microbatch "
                f"({recipe.learner.max_tokens_per_microbatch}), or set learner.gradient_checkpointing: true; neither "
                "changes the result"
            ) from error
        return write_report(run.path)
