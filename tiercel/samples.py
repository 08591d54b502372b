"""What a reward sees and answers. Imports no torch, so that a reward's own process starts at once.

Sizes are (width, height) in pixels, boxes (x1, y1, x2, y2).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Size = tuple[int, int]
Box = tuple[float, float, float, float]
CoordinateSpace = Literal["resized_pixels", "thousandths", "unit"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn of the prompt; `<image>` marks an image's place."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleImage:
    """An image as a reward sees it: its name and sizes, not its pixels."""

    path: str | None
    original_size: Size
    processed_size: Size


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What a reward function gets: plain data, JSON throughout."""

    id: str
    prompt: str  # the last user turn, as written in the row
    completion: str
    token_count: int
    is_truncated: bool
    answer: Any
    columns: Mapping[str, Any]
    images: tuple[SampleImage, ...]
    coordinate_space: CoordinateSpace  # of boxes that the model writes
    messages: tuple[Turn, ...] = ()  # all turns of the prompt, as the model saw them


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardValue:
    """One reward of one completion. None with no failure: does not apply. None with a failure: unscorable."""

    value: float | None
    failure: str | None = None
