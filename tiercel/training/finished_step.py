"""The step as the Python API hands it out: metrics and rollouts, `stop()` and `set_lr()`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tiercel.runs.records import GroupRecord, groups_path
from tiercel.web.report.reading import group_file


@dataclass(slots=True)
class StepControl:
    """What the caller of the Python API asks of the steps that follow."""

    is_stopped: bool = False
    lr: float | None = None  # None: by the recipe's schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedStep:
    """A step that is recorded: its number, counted from 1, and its row of metrics.jsonl."""

    number: int
    metrics: Mapping[str, float]
    run: Path
    control: StepControl

    @property
    def rollouts(self) -> tuple[GroupRecord, ...]:
        """Return the step's prompts with their completions; none for a method that samples nothing."""
        file = groups_path(self.run, "rollouts", self.number)
        return tuple(group_file(file, self.number).groups) if file.is_file() else ()

    @property
    def rewards(self) -> list[list[float | None]]:
        """Return the reward of each completion of each prompt; None if it could not be scored."""
        return [[completion.total for completion in group.completions] for group in self.rollouts]

    @property
    def advantages(self) -> list[list[float | None]]:
        """Return the advantage of each completion of each prompt; None if it was left out."""
        return [[completion.advantage for completion in group.completions] for group in self.rollouts]

    def stop(self) -> None:
        """End the run after this step, once it is saved. The same call goes on from there."""
        self.control.is_stopped = True

    def set_lr(self, lr: float | None) -> None:
        """Learn with this rate from the next step on; None goes back to the recipe's schedule. A run that is resumed
        begins with its schedule. Raises ValueError if it is negative or not finite."""
        if lr is not None and not 0 <= lr < math.inf:
            raise ValueError(f"lr is {lr}, but a rate is a finite number from 0 on")
        self.control.lr = lr
