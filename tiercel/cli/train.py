"""`tiercel sft` and `tiercel grpo`."""

from argparse import Namespace

from tiercel.config import GrpoRecipe
from tiercel.runs.recipe import Recipe
from tiercel.training import grpo, sft
from tiercel.training.ending import run_recipe


def run(recipe: Recipe, arguments: Namespace) -> None:
    """Train, and say where the report is."""
    report = run_recipe(grpo.train, recipe) if isinstance(recipe, GrpoRecipe) else run_recipe(sft.train, recipe)
    if report is not None:
        print(report)
