"""The protocol of a tracker, and the values that it is given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from PIL.Image import Image

Ending = Literal["done", "stopped", "failed"]  # of a run; stopped: by a signal, or its loop in Python was left


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedPicture:
    """A prompt's picture with one of its completions."""

    image: Image
    caption: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerPlace:
    """Where a tracker writes, and the names under which it records the run."""

    directory: Path  # trackers/NAME of the run directory; it exists
    project: str
    name: str
    id: str  # of the run; it stays the same when the run resumes
    config: Mapping[str, Any]  # the recipe without secrets
    first_step: int  # of the rows to come; later rows of an earlier process are void. 0: a new run


class Tracker(Protocol):
    """A receiver of rows and pictures. An error of any type turns the tracker off, and the run continues."""

    @property
    def needs_earlier(self) -> bool:
        """Return whether the rows before `first_step` must be sent again."""

    def row(self, step: int, metrics: Mapping[str, float], pictures: Sequence[TrackedPicture]) -> None:
        """Record the numbers of a row of metrics.jsonl, and pictures of a few of the step's rollouts, if there are
        any."""

    def close(self, ending: Ending) -> object:
        """Close the tracker, and record how the run ended. This is called once at the end of the run, unless the
        tracker was turned off."""
