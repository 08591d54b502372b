"""`tiercel predict`: complete one prompt greedily."""

import os
import sys
from argparse import Namespace
from pathlib import Path

from tiercel.config import Recipe, RewardRecipe
from tiercel.errors import RunError
from tiercel.inference_and_export.generate import as_turns, in_words, load_generator
from tiercel.inference_and_export.weights import CheckpointChoice, trained_weights, with_weights
from tiercel.log import printed
from tiercel.runs.recipe import is_run
from tiercel.types import ImageSource


def run(recipe: Recipe, arguments: Namespace) -> None:
    """Print the completion of a model or of a run's checkpoint, with the run's system message, data.prompt and
    template."""
    if isinstance(recipe, RewardRecipe):
        raise RunError(
            f"{arguments.model} is a reward model, which does not generate text; `tiercel eval {arguments.model}` "
            "shows how it ranks held-out pairs"
        )
    adapter: Path | None = arguments.adapter
    if is_run(path := Path(arguments.model)):
        choice = CheckpointChoice(step=arguments.checkpoint, is_best=arguments.best)
        trained = trained_weights(path, recipe, choice)
        recipe, adapter = with_weights(recipe, trained), adapter or trained.adapter
    images = [ImageSource(path=os.path.realpath(image)) for image in arguments.image]
    generator = load_generator(recipe, adapter)
    with printed():
        (completion,) = generator.complete(
            as_turns(arguments.prompt),
            images,
            max_new_tokens=arguments.max_new_tokens,
            environment=arguments.environment,
        )
    print(in_words(completion))
    if completion.is_truncated:
        print("the completion was cut off; allow more tokens with --max-new-tokens", file=sys.stderr)
