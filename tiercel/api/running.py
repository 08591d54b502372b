"""A run in this process or in ranks of its own, adapted to a session or a notebook."""

import atexit
import ctypes
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiercel.api.recipe import Recipe, text_of
from tiercel.config import Kind
from tiercel.config import Recipe as AnyRecipe
from tiercel.doctor.packages import imported
from tiercel.errors import EXIT_DONE, EXIT_TERMINATED, RecipeError, StallError, Terminated, TrainingError
from tiercel.reliability.privacy import keep_private
from tiercel.rewards.external import ByCall
from tiercel.rewards.runtime.in_process import PREFIX
from tiercel.runs.files import write_atomically
from tiercel.runs.fresh_start import GIVEN
from tiercel.training.finished_step import FinishedStep
from tiercel.training.process_guard import process_guard

OnStep = Callable[[FinishedStep], object]
StepIterator = Iterator[FinishedStep]
OPTIONS = ("on_step", "nproc", "iterate")  # arguments that are not keys of a recipe


def train(kind: Kind, recipe: Recipe, keys: Mapping[str, Any]) -> Path | StepIterator:
    """Train a recipe with changed keys, and return its run directory, or the steps with `iterate`. Ctrl-C ends the run
    after the current step; a script then gets Terminated, but a notebook does not."""
    options = {"on_step": None, "nproc": 1, "iterate": False} | {k: v for k, v in keys.items() if k in OPTIONS}
    changes = {name: value for name, value in keys.items() if name not in OPTIONS}
    judged = recipe.changed(**changes).judged(kind)
    on_step, nproc = options["on_step"], options["nproc"]
    if nproc > 1:
        if on_step is not None or options["iterate"]:
            raise RecipeError(
                [
                    "nproc: with several ranks, each is a process of its own, so on_step and iterate cannot be "
                    "used; leave them out"
                ]
            )
        _run_ranks(judged, nproc)
        return Path(judged.output)
    if options["iterate"]:
        steps = _steps(judged, on_step)
        atexit.register(_close, weakref.ref(steps))  # for a loop that an error ended while a variable held its steps
        return steps
    for _ in _steps(judged, on_step):
        pass
    return Path(judged.output)


def _steps(recipe: AnyRecipe, on_step: OnStep | None = None) -> Generator[FinishedStep, None, None]:
    """Yield the steps of a run in this process."""
    if recipe.runs_user_code:
        keep_private()  # before anything is forked
    main = threading.get_ident()
    run_recipe = imported("tiercel.training.run").run_recipe  # only now, because it loads torch

    def raise_here(code: int) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(StallError))

    try:
        with process_guard(recipe, recipe.kind, raise_here if is_interactive() else None) as heartbeat:
            for step in (steps := run_recipe(recipe, heartbeat)):
                try:
                    with heartbeat.away():
                        if on_step is not None:
                            on_step(step)
                        yield step
                except (Exception, GeneratorExit) as error:
                    steps.throw(error)  # it ends the run as an error of its own would, which saves before
    except Terminated as ended:
        is_left = isinstance(ended.__cause__, GeneratorExit)  # as by `break`
        if not (is_left or is_interactive() or ended.is_by_caller):
            raise


def _close(steps: "weakref.ref[Generator[FinishedStep, None, None]]") -> None:
    if (left := steps()) is not None:
        left.close()


def is_interactive() -> bool:
    """Return whether a person is at a prompt or in a notebook, whose process must not be ended."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules


def _run_ranks(recipe: AnyRecipe, nproc: int) -> None:
    """Train with ranks on this machine, which read the recipe from a file. Raises TrainingError if they fail."""
    if here := [each.call for each in getattr(recipe, "rewards", ()) if _is_here(each)]:
        raise RecipeError([f"nproc: {here[0].rpartition(':')[2]} exists only in this process; put it into a file"])
    file = Path(recipe.output) / GIVEN / "recipe.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text_of(recipe))
    command = [sys.executable, "-m", "tiercel", recipe.kind, str(file), "--nproc", str(nproc)]
    with subprocess.Popen(command) as process, _handed_on(process):
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:  # the ranks got it as well; they save and exit
                continue
    if code == EXIT_TERMINATED and not is_interactive():
        raise Terminated("the ranks were stopped by a signal, and saved; train again to resume")
    if code not in (EXIT_DONE, EXIT_TERMINATED):
        raise TrainingError(f"the ranks ended with exit code {code}; what they printed above says why")


@contextmanager
def _handed_on(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Hand SIGTERM on to the ranks inside the context: without this process they would train on. Only the main thread
    can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _is_here(reward: object) -> bool:
    return isinstance(reward, ByCall) and reward.call.startswith(PREFIX)
