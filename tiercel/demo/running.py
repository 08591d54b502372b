"""Commands of tiercel that the demos run, each in its own process."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tiercel.errors import TrainingError
from tiercel.writing import writing

RowsT = TypeVar("RowsT")  # the description of one file of rows
RECIPES = Path("recipes")
SHIPPED = Path(__file__).parent / "recipes"  # in the repository, a link to its recipes/


def require_recipes(*names: str) -> None:
    """Copy each recipe that is missing in the working directory's recipes/ to there, and print a note if an existing
    one differs from the shipped one. Raises RunError if the directory cannot be written."""
    for name in names:
        recipe = RECIPES / name
        if not recipe.is_file():
            with writing(recipe, "start the demo in a directory that can be written"):
                RECIPES.mkdir(exist_ok=True)
                shutil.copyfile(SHIPPED / name, recipe)
        elif recipe.read_bytes() != (SHIPPED / name).read_bytes():
            print(f"{recipe} is not the one that this tiercel ships; it is used as it is", flush=True)


def write_data(
    data: Path, what: str, start: Path, write: Callable[[Path, RowsT], Path], files: Sequence[RowsT]
) -> None:
    """Write the demo's rows with `write`, and copy its starting checkpoint, unless an earlier call has finished: the
    held-out rows are written last. `what` is printed. Raises RunError if the directory cannot be written."""
    if (data / "heldout.jsonl").exists():
        return
    print(f"{what} -> {data}", flush=True)
    with writing(data, "start the demo in a directory that can be written"):
        shutil.copytree(start, data / "start", dirs_exist_ok=True)
        for rows in files:
            write(data, rows)


def run_command(*arguments: str) -> None:
    """Run a tiercel command in its own process. Raises TrainingError if it fails."""
    code = subprocess.run([sys.executable, "-m", "tiercel", *arguments], check=False).returncode
    if code != 0:
        raise TrainingError(f"tiercel {' '.join(arguments)} ended with exit code {code}; see above")


def show_command(place: str, what: str, *arguments: str) -> None:
    """Print the number of a step, such as 2/4, its command and what that does, and run the command. Raises
    TrainingError."""
    print(f"{place} tiercel {' '.join(arguments)}{f': {what}' if what else ''}", flush=True)
    run_command(*arguments)


def evaluations_of(run: Path, rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a run's rows of metrics that have an evaluation. Raises TrainingError if there are fewer than two."""
    found = [row for row in rows if "eval/accuracy" in row]
    if len(found) < 2:
        raise TrainingError(f"{run} has no evaluations from before and after training; run the demo again")
    return found
