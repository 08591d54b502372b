"""Commands of tiercel that the demos run, each in its own process."""

import subprocess
import sys
from pathlib import Path

from tiercel.errors import EnvironmentProblem, TrainingError

RECIPES = Path("recipes")


def require_recipes(*names: str) -> None:
    """Raise EnvironmentProblem where a recipe is not in the working directory's recipes/."""
    for name in names:
        if not (RECIPES / name).is_file():
            raise EnvironmentProblem(f"{RECIPES / name} is not here; run the demo in tiercel's own directory")


def run_command(*arguments: str) -> None:
    """Run a tiercel command in its own process. Raises TrainingError where it fails."""
    code = subprocess.run([sys.executable, "-m", "tiercel", *arguments], check=False).returncode
    if code != 0:
        raise TrainingError(f"tiercel {' '.join(arguments)} ended with exit code {code}; see above")
