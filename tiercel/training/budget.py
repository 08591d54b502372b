"""The tokens of a microbatch where the recipe leaves them to the plan: taken once, and kept in the run directory.

Rounding depends on how rows are packed, so a run goes on with the number that it began with, on another machine too.
"""

import json
import os

from tiercel.config.schema import BaseRecipe
from tiercel.errors import RunError
from tiercel.regular_files import read_json
from tiercel.runs.directory import RunDirectory
from tiercel.runs.files import write_atomically
from tiercel.writing import GO_ON, writing

FILE, KEY = "chosen.json", "learner.max_tokens_per_microbatch"


def kept_tokens(recipe: BaseRecipe, run: RunDirectory) -> int | None:
    """Read what this run took before; None in a new run, and where the recipe has a number. Raises RunError for a file
    that is not as it was written."""
    file = run.path / FILE

    def read() -> int | None:
        if recipe.learner.max_tokens_per_microbatch != "auto" or not os.path.lexists(file):
            return None
        try:
            return int(read_json(file)[KEY])
        except (OSError, ValueError, LookupError, TypeError, OverflowError) as error:
            raise RunError(f"{file} does not say {KEY}: {error}; write the number from log.txt there") from error

    return run.ranks.on_first(read)


def keep_tokens(recipe: BaseRecipe, run: RunDirectory, tokens: int) -> None:
    """Write what a run took, where the recipe does not have it."""
    if recipe.learner.max_tokens_per_microbatch != "auto":
        return
    file = run.path / FILE

    def write() -> None:
        with writing(file, GO_ON):
            write_atomically(file, json.dumps({KEY: tokens}))

    run.ranks.on_first(write)


def with_tokens(recipe: BaseRecipe, tokens: int) -> BaseRecipe:
    """Return the recipe with this number of tokens."""
    learner = recipe.learner.model_copy(update={"max_tokens_per_microbatch": tokens})
    return recipe.model_copy(update={"learner": learner})
