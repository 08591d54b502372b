"""The commands that train."""

from argparse import Namespace
from pathlib import Path

from tiercel.config import Recipe
from tiercel.processes import launched_rank
from tiercel.reliability.heartbeat import Heartbeat
from tiercel.training.run import run_recipe
from tiercel.web.report.page import FILE


def run(recipe: Recipe, arguments: Namespace, heartbeat: Heartbeat) -> None:
    """Train, and print the path of the report. `heartbeat` is this process's heartbeat, which the watchdog reads."""
    for _ in run_recipe(recipe, heartbeat):
        pass
    if not launched_rank():
        print(Path(recipe.output) / FILE)
