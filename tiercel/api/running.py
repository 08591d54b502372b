"""A run in this process, or as ranks of its own, with what a session or a notebook expects of it."""

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from tiercel.api.recipe import text_of
from tiercel.api.run import Run
from tiercel.config import Recipe
from tiercel.errors import EXIT_DONE, EXIT_TERMINATED, RecipeError, StallError, Terminated, TrainingError
from tiercel.reliability.privacy import keep_private
from tiercel.rewards.external import ByCall
from tiercel.rewards.runtime.here import PREFIX
from tiercel.runs.directory import GIVEN
from tiercel.runs.files import write_atomically
from tiercel.training.finished_step import FinishedStep
from tiercel.training.run import run_recipe
from tiercel.training.watching import watched

OnStep = Callable[[FinishedStep], object]
StepIterator = Iterator[FinishedStep]


def start(recipe: Recipe, on_step: OnStep | None, nproc: int, iterate: bool) -> Run | StepIterator:
    """Train a recipe. In a notebook Ctrl-C ends it after the step, and the Run is returned; in a script Terminated is
    raised then."""
    if nproc > 1:
        if on_step is not None or iterate:
            raise RecipeError(["nproc: several ranks are processes of their own; leave on_step and iterate out"])
        return _ranks(recipe, nproc)
    if iterate:
        return _steps(recipe)
    for step in _steps(recipe):
        if on_step is not None:
            on_step(step)
    return Run(Path(recipe.output))


def _steps(recipe: Recipe) -> StepIterator:
    """Yield the steps of a run in this process."""
    if recipe.runs_user_code:
        keep_private()  # before anything is forked
    main, last = threading.get_ident(), None

    def raise_here(code: int) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(StallError))

    try:
        with watched(recipe, recipe.kind, raise_here if is_interactive() else None) as heartbeat:
            for last in run_recipe(recipe, heartbeat):
                yield last
    except Terminated:
        if not (is_interactive() or (last is not None and last.control.is_stopped)):
            raise


def is_interactive() -> bool:
    """Tell whether a person is at a prompt or in a notebook, whose process is not to be ended."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


def _ranks(recipe: Recipe, nproc: int) -> Run:
    """Train as ranks of this machine, which read the recipe from a file. Raises TrainingError if they fail."""
    if here := [each.call for each in getattr(recipe, "rewards", ()) if _is_here(each)]:
        raise RecipeError([f"nproc: {here[0].removeprefix(PREFIX)} lives in this process; put it into a file"])
    file = Path(recipe.output) / GIVEN / "recipe.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text_of(recipe))
    command = [sys.executable, "-m", "tiercel", recipe.kind, str(file), "--nproc", str(nproc)]
    with subprocess.Popen(command) as process:
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:  # which the ranks got as well: they save, and end
                continue
    if code not in (EXIT_DONE, EXIT_TERMINATED):
        raise TrainingError(f"the ranks ended with exit code {code}; what they printed above says why")
    return Run(Path(recipe.output))


def _is_here(reward: object) -> bool:
    return isinstance(reward, ByCall) and reward.call.startswith(PREFIX)
