"""An update that is not finite: what it was computed from is kept, and the run ends, or leaves a few such out."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from tiercel.config.schema import BaseRecipe
from tiercel.errors import NonFiniteError
from tiercel.models.saving import save_adapter
from tiercel.reliability.redaction import redact_values
from tiercel.runs.directory import RunDirectory
from tiercel.runs.files import write_atomically
from tiercel.training.update import Engine

FOLDER = "nonfinite"
NAME = re.compile(r"step-(\d{6,})(?:-(\d+))?")
REPORT = "report.json"
T = TypeVar("T")


def kept_name(run: Path, step: int, number: int) -> Path:
    """Where the step's `number`-th update that was not finite is kept, counted from 1."""
    return run / FOLDER / (f"step-{step:06d}" + (f"-{number}" if number > 1 else ""))


def kept_of_step(run: Path, step: int | None) -> list[Path]:
    """In their order; of every step where None."""
    found = ((NAME.fullmatch(directory.name), directory) for directory in (run / FOLDER).glob("step-*"))
    numbered = [((int(name[1]), int(name[2] or 1)), directory) for name, directory in found if name is not None]
    return [directory for numbers, directory in sorted(numbered) if step in (None, numbers[0])]


class FiniteGuard:
    """All ranks call it together. `left_out` updates so far, of reliability.max_skipped_updates in a start of the
    run."""

    def __init__(self, run: RunDirectory, recipe: BaseRecipe, engine: Engine, say: Callable[[str], None]):
        self.run = run
        self.recipe = recipe
        self.engine = engine
        self.say = say
        self.left_out = 0
        self._kept: Counter[int] = Counter()  # by step, which may have several updates

    def attempt(self, update: Callable[[], T], keep: Callable[[Path], None] = lambda directory: None) -> T | None:
        """The update, or None where it is left out. `keep` writes, on the first rank, what its rows, its weights and
        its step do not tell. Raises NonFiniteError."""
        step = self.engine.ranks.pulse.doing.step
        try:
            return update()
        except NonFiniteError as error:
            again = self._keep(step, error, keep)
            if self.left_out >= self.recipe.reliability.max_skipped_updates:
                raise NonFiniteError(error.what, error.rows, again) from error
            self.left_out += 1
            self.engine.strategy.leave_out()
            self.say(f"step {step + 1}: an update was left out ({self.left_out} so far): {error.what}; {again}")
            return None

    def _keep(self, step: int, error: NonFiniteError, keep: Callable[[Path], None]) -> str:
        """What to do about it. A full disk must not hide why the run ends."""
        self._kept[step] += 1
        directory = kept_name(self.run.path, step, self._kept[step])
        engine = self.engine
        weights = engine.strategy.trained_weights() if self.recipe.lora is not None else {}
        report = {"step": step, "what": error.what, "rows": error.rows, "world_size": engine.ranks.world_size}

        def write() -> str:
            try:
                if self._kept[step] == 1:
                    for old in kept_of_step(self.run.path, step):  # of an earlier start of the run
                        shutil.rmtree(old)
                directory.mkdir(parents=True, exist_ok=True)
                if self.recipe.lora is not None:
                    save_adapter(engine.policy, directory / "adapter", weights)
                keep(directory)
                write_atomically(directory / REPORT, json.dumps(redact_values(report), indent=1))
            except (OSError, SafetensorError) as problem:
                return f"it could not be kept in {directory} for a replay: {problem}"
            return f"`tiercel replay {self.run.path}` computes it again, row by row, from {directory}"

        return engine.ranks.on_first(write)
