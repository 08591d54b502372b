"""Types that a reward gets and returns. This file does not import torch, so that a reward's process starts fast.

Sizes are (width, height) in pixels, boxes are (x1, y1, x2, y2).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from PIL.Image import Image

Size = tuple[int, int]
Box = tuple[float, float, float, float]
Point = tuple[float, float]
CoordinateSpace = Literal["resized_pixels", "thousandths", "unit"]  # the spaces that a model may write
BoxSpace = Literal["pixels", "thousandths", "unit"]  # of rows; pixels are of the original image

# A thought that opens at the end of a text, and may close again there, as <think>, <thinking> or <seed:think>.
_OPENED = re.compile(r"<([\w:-]*(?:think|thought|reason)[\w:-]*)>\s*(?:</\1>\s*)?\Z", re.IGNORECASE)


def opened_by(text: str, last_turn: str) -> str:
    """Return what a chat template wrote of the policy's turn at the end of a rendered prompt, whose last turn was this:
    the tag of a thought, else nothing."""
    found, last = _OPENED.search(text), last_turn.rstrip()
    is_users = bool(last) and text.rstrip().endswith(last)  # a template that writes nothing after the prompt
    return "" if found is None or is_users else found.group()


def column(columns: Mapping[str, Any], name: str) -> Any:
    """Return the value of a row's column, or None if the row does not have it. `reward_model.ground_truth` is a value
    within the column `reward_model`, unless a column has that whole name."""
    value: Any = columns
    for key in (name,) if name in columns else name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn of the prompt. `<image>` marks the place of an image."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleImage:
    """An image for a reward: its path as in the row and its sizes. `open` reads the picture."""

    path: str | None
    original_size: Size
    processed_size: Size
    # Where it can be opened while the reward runs, even if it is in the row itself.
    file: str | None = field(default=None, compare=False)
    grid_thw: tuple[int, int, int] | None = field(default=None, compare=False)  # of its patches, for families of Qwen

    def open(self) -> "Image":
        """Open the picture as the model saw it, but before it was resized: upright, in RGB. Raises FileNotFoundError if
        there is no file, as for a video and for a picture that an environment added."""
        from tiercel.image_decoding import open_picture  # imported here because most rewards do not open pictures

        if self.file is None:
            raise FileNotFoundError(f"{self.path or 'this picture'} has no file here: a video, or an environment's")
        return open_picture(self.file)


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardValue:
    """One reward of one completion. None without a failure: the reward does not apply. None with a failure: the
    completion could not be scored."""

    value: float | None
    failure: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One tool call of the policy. `failure` says why it has no result; the policy was told so."""

    name: str
    arguments: Mapping[str, Any]
    failure: str | None = None
    is_known: bool = True  # false: there is no such tool


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTurn:
    """What the policy wrote in one turn, and the answer to it."""

    text: str
    token_count: int
    calls: tuple[ToolCall, ...] = ()
    answer: str | None = None  # `<image>` marks each picture; None: there was no answer, and the trajectory ended
    images: tuple[SampleImage, ...] = ()  # of the answer


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """What a reward function gets. All of it is plain JSON data."""

    id: str
    prompt: str  # text of the last user turn, as in the row
    completion: str
    token_count: int
    is_truncated: bool
    answer: Any
    columns: Mapping[str, Any]
    images: tuple[SampleImage, ...]
    coordinate_space: CoordinateSpace | None  # of boxes that the model writes; None: unknown
    messages: tuple[Turn, ...] = ()  # all turns of the prompt, as the model saw them
    turns: tuple[
        PolicyTurn, ...
    ] = ()  # with tools or an environment: what the policy did; `completion` is the last text
    answer_image: int | None = 0  # which of `images` has the boxes of the right answer; None: several
    answer_space: BoxSpace = "pixels"  # of boxes in the right answer
    outcome: RewardValue | None = None  # what the environment's get_reward returned; None if it has none
    named: Mapping[str, Any] = field(default_factory=dict)  # what the row's own framework gives its rewards, by name
    opened: str = ""  # what the chat template wrote of this turn before the completion, such as "<think>\n"


def decode_turn(fields: Mapping[str, Any]) -> PolicyTurn:
    """Read a turn that `dataclasses.asdict` wrote and that was sent as JSON."""
    calls = tuple(ToolCall(**call) for call in fields["calls"])
    return PolicyTurn(**{**fields, "calls": calls, "images": images_of(fields["images"])})


def images_of(listed: Sequence[Mapping[str, Any]]) -> tuple[SampleImage, ...]:
    """Read images that were sent in the same way, with lists of sizes as tuples again."""
    return tuple(
        SampleImage(
            path=image["path"],
            original_size=tuple(image["original_size"]),
            processed_size=tuple(image["processed_size"]),
            file=image["file"],
            grid_thw=None if image["grid_thw"] is None else tuple(image["grid_thw"]),
        )
        for image in listed
    )
