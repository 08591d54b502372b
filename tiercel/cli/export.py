"""`tiercel export`: write what a run trained as a Hugging Face directory that vLLM and transformers load."""

from argparse import Namespace

from tiercel.config import Recipe
from tiercel.errors import RecipeError
from tiercel.inference_and_export.export import export
from tiercel.inference_and_export.weights import CheckpointChoice


def run(recipe: Recipe, arguments: Namespace) -> None:
    """Export as the command line says, and print where the result is."""
    choice = CheckpointChoice(step=arguments.checkpoint, is_best=arguments.best)
    if arguments.public and arguments.push is None:
        raise RecipeError(
            ["--public: is set, but --push is not; add --push, whose repository --public makes public"], source="export"
        )
    if arguments.push is not None:
        from tiercel.inference_and_export.push import push

        print(
            push(recipe, arguments.run, arguments.push, merge=arguments.merge, choice=choice, public=arguments.public)
        )
        return
    target = arguments.output or arguments.run / ("model" if arguments.merge else "adapter")
    print(export(recipe, arguments.run, target, merge=arguments.merge, choice=choice))
