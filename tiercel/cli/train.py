"""The commands that train."""

import os
from argparse import Namespace
from pathlib import Path

from tiercel.config import Recipe
from tiercel.reliability.heartbeat import Heartbeat
from tiercel.training.run import run_recipe
from tiercel.web.report.page import FILE


def run(recipe: Recipe, arguments: Namespace, heartbeat: Heartbeat) -> None:
    """Train, and print the path of the report. `heartbeat` is this process's heartbeat, which the watchdog reads."""
    for _ in run_recipe(recipe, heartbeat):
        pass
    if os.environ.get("RANK", "0") == "0":
        print(Path(recipe.output) / FILE)
