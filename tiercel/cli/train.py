"""The verbs that train."""

from argparse import Namespace

from tiercel.config import GrpoRecipe, Recipe
from tiercel.reliability.pulse import Pulse
from tiercel.training import grpo, offline
from tiercel.training.run import run_recipe


def run(recipe: Recipe, arguments: Namespace, pulse: Pulse) -> None:
    """Train, and print where the report is. `pulse`: the pulse of this process, which the watchdog reads."""
    if isinstance(recipe, GrpoRecipe):
        report = run_recipe(grpo.train, recipe, pulse)
    else:
        report = run_recipe(offline.train, recipe, pulse)
    if report is not None:
        print(report)
