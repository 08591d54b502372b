"""`tiercel export`: write what a run trained as a Hugging Face directory that vLLM and transformers load."""

from argparse import Namespace

from tiercel.config import Recipe
from tiercel.trained.export import export
from tiercel.trained.weights import CheckpointChoice


def run(recipe: Recipe, arguments: Namespace) -> None:
    """Export as the command line says, and say where to."""
    target = arguments.output or arguments.run / ("model" if arguments.merge else "adapter")
    choice = CheckpointChoice(step=arguments.checkpoint, is_best=arguments.best)
    print(export(recipe, arguments.run, target, merge=arguments.merge, choice=choice))
