"""The verbs that train."""

from argparse import Namespace

from tiercel.config import GrpoRecipe, Recipe
from tiercel.reliability.heartbeat import Heartbeat
from tiercel.training.grpo import loop as grpo
from tiercel.training.offline import loop as offline
from tiercel.training.run import run_recipe


def run(recipe: Recipe, arguments: Namespace, heartbeat: Heartbeat) -> None:
    """Train, and print where the report is. `heartbeat`: the pulse of this process, which the watchdog reads."""
    if isinstance(recipe, GrpoRecipe):
        report = run_recipe(grpo.train, recipe, heartbeat)
    else:
        report = run_recipe(offline.train, recipe, heartbeat)
    if report is not None:
        print(report)
