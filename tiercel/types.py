"""The chain of frozen types that data flows through.

    Row -> EncodedPrompt -> Completion -> ScoredGroup -> PolicyBatch
    data/  models/          rollout/      rewards/       learner/

Shape suffixes: P prompt tokens, C completion tokens, D position dimensions (3 for M-RoPE, else 1),
H W height and width of a picture. Sizes are (width, height) in pixels, boxes (x1, y1, x2, y2).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from tiercel.samples import Box as Box
from tiercel.samples import CoordinateSpace as CoordinateSpace
from tiercel.samples import RewardValue as RewardValue
from tiercel.samples import Sample as Sample
from tiercel.samples import SampleImage as SampleImage
from tiercel.samples import Size as Size

VISUAL_MARK = re.compile("<image>|<video>")


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn. `<image>`, `<video>` and `<bbox>` mark the places of the row's images, videos and boxes, in order."""

    role: Literal["system", "user", "assistant"]
    content: str
    is_trained: bool = True  # of an assistant turn: SFT learns it


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSource:
    """Where an image comes from: a file, or bytes embedded in the row."""

    path: str | None = None
    data: bytes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoSource:
    """Where a video comes from: a file, or pictures of its frames."""

    path: str
    frames: tuple[ImageSource, ...] = ()  # none: `path` is a video file
    fps: float | None = None  # frames a second, of `frames` as given or to be taken of a file; None: as the recipe says


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRoots:
    """The directories that files of images and videos lie under, symbolic links followed."""

    base: str = "."  # relative paths resolve here; absolute ones may lead here
    more: tuple[str, ...] = ()  # absolute ones may lead here, too


@dataclass(frozen=True, kw_only=True, slots=True)
class PixelLimits:
    """What an image may have after resizing; None: as the recipe says."""

    least: int | None = None
    most: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of the user's data, whatever its format was."""

    id: str
    messages: tuple[Message, ...]
    images: tuple[ImageSource, ...] = ()
    videos: tuple[VideoSource, ...] = ()
    answer: Any = None
    boxes: tuple[Box, ...] = ()  # fill <bbox> marks; in pixels of the original image
    box_images: tuple[int, ...] = ()  # for each box, the image it lies on
    pixels: PixelLimits | None = None  # of its images, within the recipe's
    columns: Mapping[str, Any]  # every other column, as read
    file: str
    line: int  # 1-based
    image_roots: ImageRoots = ImageRoots()

    @property
    def visuals(self) -> tuple[ImageSource | VideoSource, ...]:
        """Images and videos in the order of their marks."""
        images, videos = iter(self.images), iter(self.videos)
        marks = (mark for message in self.messages for mark in VISUAL_MARK.findall(message.content))
        return tuple(next(images) if mark == "<image>" else next(videos) for mark in marks)


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectedRow:
    """A row that cannot be used; written to bad_rows.jsonl."""

    id: str
    file: str
    line: int
    field: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagePlan:
    """What a family makes of an image or a video, known from the header alone."""

    original_size: Size
    processed_size: Size  # after resizing
    grid: tuple[int, ...]  # the family's own: (t, h, w) patches for Qwen, (rows, columns) of tiles for Ovis2
    token_count: int  # tokens in the prompt, indicators included
    frame_count: int = 1
    fps: float | None = None  # of a video's frames; None: an image


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedImage:
    """An image, or the frames of a video, decoded and resized once; everything later starts from `views`."""

    sha256: str  # of the views' bytes: equal pictures share vision features
    plan: ImagePlan
    views: tuple[Tensor, ...]  # uint8 (H, W, 3); the first is the whole picture as resized


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPrompt:
    """A prompt as the model sees it."""

    row: Row
    index: int  # in the global order of the run
    text: str  # rendered, one placeholder per image
    token_ids_P: Tensor  # int64
    positions_DP: Tensor  # int64
    images: tuple[EncodedImage, ...]
    messages: tuple[Message, ...] = ()  # the turns that were rendered, for engines that render by themselves


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedConversation:
    """A prompt and the turns that follow it, for SFT. Positions go on where the prompt's end."""

    prompt: EncodedPrompt  # its images are those of the whole conversation
    token_ids_L: Tensor  # int64
    positions_DL: Tensor  # int64
    is_scored_L: Tensor  # bool, tokens of assistant turns

    @property
    def row(self) -> Row:
        return self.prompt.row


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled completion, its end token included where it has one."""

    token_ids_L: Tensor  # int64
    logprobs_L: Tensor  # fp32, under the distribution it was drawn from; NaN where the engine cannot say
    text: str  # without the end token
    is_truncated: bool
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The completions of one prompt under one policy version."""

    prompt: EncodedPrompt
    completions: tuple[Completion, ...]
    policy_version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredCompletion:
    """A completion, its rewards by name, and their weighted sum (None: masked)."""

    completion: Completion
    rewards: Mapping[str, RewardValue]
    total: float | None
    is_correct: bool | None  # by the first reward that knows right from wrong


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredGroup:
    """A group with rewards; advantages are made from it by algorithms/."""

    group: Group
    completions: tuple[ScoredCompletion, ...]
