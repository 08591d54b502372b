"""`tiercel sft` and `tiercel grpo`."""

from argparse import Namespace

from tiercel.config import GrpoRecipe
from tiercel.runs.recipe import Recipe
from tiercel.training.ending import run_recipe


def run(recipe: Recipe, arguments: Namespace) -> None:
    """Train, and say where the report is."""
    if isinstance(recipe, GrpoRecipe):
        from tiercel.training import grpo

        report = run_recipe(grpo.train, recipe)
    else:
        from tiercel.training import sft

        report = run_recipe(sft.train, recipe)
    if report is not None:
        print(report)
