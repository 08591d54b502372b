"""What a tracker is, and what it is given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from PIL.Image import Image


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A prompt's picture with one of its completions."""

    image: Image
    caption: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a tracker writes, and what it calls the run."""

    directory: Path  # trackers/NAME of the run directory; there already
    project: str
    name: str
    id: str  # of the run; the same when it goes on from a checkpoint
    config: Mapping[str, Any]  # the recipe without secrets
    first_step: int  # of the rows to come; what was tracked from there on was cut off. 0: a new run


class Tracker(Protocol):
    """A sink of rows and pictures. Whatever it raises turns it off, not the run."""

    @property
    def needs_earlier(self) -> bool:
        """Whether it lacks what came before `first_step`, and is to be given it again."""

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        """A row of metrics.jsonl, numbers only."""

    def images(self, step: int, pictures: Sequence[Picture]) -> None:
        """A few of the step's rollouts."""

    def close(self) -> None:
        """Called once, however the run ends, unless the tracker was turned off."""
