"""What every training command does around its loop: memory errors in plain words, the report at the end."""

from collections.abc import Callable
from typing import TypeVar

import torch

from tiercel.config.schema import BaseRecipe
from tiercel.errors import TrainingError
from tiercel.report import write_report
from tiercel.runs.directory import RunDirectory

AnyRecipe = TypeVar("AnyRecipe", bound=BaseRecipe)


def with_report(train: Callable[[AnyRecipe], RunDirectory], recipe: AnyRecipe) -> None:
    """Train and write report.html. Raises TrainingError where memory runs out."""
    try:
        run = train(recipe)
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"out of memory: {str(error).splitlines()[0]}\nlower learner.max_tokens_per_microbatch "
            f"({recipe.learner.max_tokens_per_microbatch}), or set learner.gradient_checkpointing: true; neither "
            "changes the result"
        ) from error
    print(write_report(run.path))
