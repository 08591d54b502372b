"""Frozen types of the data, in the order in which the data passes through the packages.

    Row -> EncodedPrompt -> Completion -> ScoredGroup -> PolicyBatch
    data/  models/          rollout/      rewards/       packing/

Shape suffixes: docs/shapes.md. Sizes are (width, height) in pixels, boxes are (x1, y1, x2, y2).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from tiercel.reward_types import Box as Box
from tiercel.reward_types import BoxSpace as BoxSpace
from tiercel.reward_types import CoordinateSpace as CoordinateSpace
from tiercel.reward_types import Point as Point
from tiercel.reward_types import PolicyTurn as PolicyTurn
from tiercel.reward_types import RewardValue as RewardValue
from tiercel.reward_types import Sample as Sample
from tiercel.reward_types import SampleImage as SampleImage
from tiercel.reward_types import Size as Size
from tiercel.reward_types import opened_by

VISUAL_MARK = re.compile("<image>|<video>")


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One turn. `<image>`, `<video>` and `<bbox>` mark the places of the row's images, videos and boxes, in order."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    is_trained: bool = True  # for an assistant turn: whether SFT trains on it
    tool: str | None = None  # for a tool turn: the tool that answered


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSource:
    """Where an image comes from: a file, or bytes in the row itself."""

    path: str | None = None
    data: bytes | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoSource:
    """Where a video comes from: a file, or images of its frames."""

    path: str
    frames: tuple[ImageSource, ...] = ()  # empty: `path` is a video file
    fps: float | None = None  # frames per second of `frames`, or to take from the file; None: the recipe's


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRoots:
    """The directories that contain the files of images and videos. Symbolic links are followed."""

    base: str = "."  # relative paths start here; absolute paths may lead here
    more: tuple[str, ...] = ()  # absolute paths may lead here too


@dataclass(frozen=True, kw_only=True, slots=True)
class PixelLimits:
    """Limits on the number of pixels of an image after resizing. None: the recipe's limit."""

    least: int | None = None
    most: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of the user's data, from any format."""

    id: str
    messages: tuple[Message, ...]
    images: tuple[ImageSource, ...] = ()
    videos: tuple[VideoSource, ...] = ()
    answer: Any = None
    boxes: tuple[Box | Point, ...] = ()  # they replace the <bbox> marks; in pixels of the original image
    box_images: tuple[int, ...] = ()  # for each box, the number of its image
    answer_image: int | None = 0  # of the boxes in the answer; None: they are on several images
    answer_space: BoxSpace = "pixels"  # of boxes in the answer
    pixels: PixelLimits | None = None  # limits of the row's images, within those of the recipe
    columns: Mapping[str, Any]  # every other column, as it was read
    left_out: tuple[tuple[str, str], ...] = ()  # columns with a value of a type that JSON does not have, and that type
    file: str
    line: int  # counted from 1
    image_roots: ImageRoots = ImageRoots()
    rejected: "Row | None" = None  # of a pair: the same row with the answer that was not preferred
    label: bool | None = None  # of a labelled row: whether the answer is good
    named: Mapping[str, Any] = field(default_factory=dict)  # what the format's own framework gives its rewards, by name

    @property
    def sides(self) -> tuple["Row", ...]:
        """Return the row, and for a pair also the one with the rejected answer."""
        return (self,) if self.rejected is None else (self, self.rejected)

    @property
    def answer_visual(self) -> int | None:
        """Return the place among `visuals` of the image that the boxes of the answer are on."""
        images = [place for place, source in enumerate(self.visuals) if isinstance(source, ImageSource)]
        return images[self.answer_image] if self.answer_image is not None and images else self.answer_image

    @property
    def visuals(self) -> tuple[ImageSource | VideoSource, ...]:
        """Return images and videos in the order of their marks."""
        images, videos = iter(self.images), iter(self.videos)
        marks = (mark for message in self.messages for mark in VISUAL_MARK.findall(message.content))
        return tuple(next(images) if mark == "<image>" else next(videos) for mark in marks)


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectedRow:
    """A row that cannot be used, for bad_rows.jsonl."""

    id: str
    file: str
    line: int
    field: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ImagePlan:
    """How a family will process an image or a video. The header of the file is enough to make this plan."""

    original_size: Size
    processed_size: Size  # after resizing
    grid: tuple[int, ...]  # defined by the family: (t, h, w) patches for Qwen, (rows, columns) of tiles for Ovis2
    token_count: int  # tokens in the prompt, with indicator tokens
    frame_count: int = 1
    fps: float | None = None  # frames per second of a video; None: an image


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedImage:
    """An image, or the frames of a video, decoded and resized once. Every later stage uses `views`."""

    sha256: str  # of the views' bytes: equal pictures share vision features
    plan: ImagePlan
    views: tuple[Tensor, ...]  # uint8 (Y, X, 3); the first is the whole picture after resizing


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPrompt:
    """A prompt as the model gets it."""

    row: Row
    index: int  # in the global order of the run
    text: str  # rendered by the chat template, with one placeholder for each image
    token_ids_P: Tensor  # int64
    positions_DP: Tensor  # int64
    images: tuple[EncodedImage, ...]
    messages: tuple[Message, ...] = ()  # the rendered turns, for engines that render them themselves
    picture_spans: tuple[tuple[int, int], ...] = ()  # start and stop of tokens that see each other in both directions

    @property
    def opened(self) -> str:
        """Return what the chat template wrote of the policy's turn: the tag of a thought if the text ends with one,
        else nothing."""
        return opened_by(self.text, self.messages[-1].content if self.messages else "")

    @property
    def image_paths(self) -> tuple[str | None, ...]:
        """Return the file of each image, or None for one in the row itself and for one that an environment added."""
        visuals = self.row.visuals  # may have images of later turns too
        return tuple(visuals[i].path if i < len(visuals) else None for i in range(len(self.images)))


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedConversation:
    """A prompt and what follows it from the first turn that is trained on. Its positions follow those of the prompt."""

    prompt: EncodedPrompt  # has the images of the whole conversation
    token_ids_L: Tensor  # int64
    positions_DL: Tensor  # int64
    is_scored_L: Tensor  # bool: tokens of assistant turns
    picture_spans: tuple[tuple[int, int], ...] = ()  # as in EncodedPrompt

    @property
    def row(self) -> Row:
        """Return the row of the conversation."""
        return self.prompt.row


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """What a row gives to learn from without sampling: its conversation; for a pair, the chosen and the rejected one;
    for a labelled row, its own and one with another row's answer."""

    conversations: tuple[EncodedConversation, ...]

    @property
    def row(self) -> Row:
        """Return the row."""
        return self.prompt.row

    @property
    def prompt(self) -> EncodedPrompt:
        """Return the prompt of the first conversation."""
        return self.conversations[0].prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What follows a turn of the policy: the answer of a tool or an environment, up to the point where the policy
    writes again."""

    token_ids_L: Tensor  # int64; the first is the token with which the chat template ends the turn
    images: tuple[EncodedImage, ...] = ()  # in the order of their placeholders


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """The turns of a completion between which a tool or an environment answered."""

    is_sampled_L: Tensor  # bool; the other tokens were observed
    positions_DL: Tensor  # int64
    images: tuple[EncodedImage, ...]  # of the answers, in the order of their placeholders
    picture_spans: tuple[tuple[int, int], ...]  # as in EncodedPrompt
    turns: tuple[PolicyTurn, ...]
    outcome: RewardValue | None  # of the environment; None if it gives no reward
    failure: str | None  # why the environment could not continue; the completion then cannot be scored

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Return start and stop of the tokens of each turn. There is an answer between two turns."""
        is_sampled = [False, *self.is_sampled_L.tolist(), False]
        edges = [place for place in range(len(is_sampled) - 1) if is_sampled[place] != is_sampled[place + 1]]
        return tuple(zip(edges[::2], edges[1::2], strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled completion, with its end token if it has one. With a trajectory, it has all turns and the answers
    between them."""

    token_ids_L: Tensor  # int64
    logprobs_L: Tensor  # fp32, under the distribution that the token was sampled from; NaN if the engine has none
    text: str  # without the end token; of the last turn
    is_truncated: bool
    seed: int
    trajectory: Trajectory | None = None
    forks: tuple[int, ...] = ()  # how many first tokens are those of other completions too, at each fork of the group

    @property
    def is_sampled_L(self) -> Tensor:
        """Return a bool mask of the tokens that the policy sampled."""
        if self.trajectory is not None:
            return self.trajectory.is_sampled_L
        return torch.ones_like(self.token_ids_L, dtype=torch.bool)

    @property
    def failure(self) -> str | None:
        """Return why the environment of its trajectory failed, or None."""
        return None if self.trajectory is None else self.trajectory.failure

    @property
    def sampled_logprobs(self) -> Tensor:
        """Return the logprobs of the tokens that the policy sampled."""
        return self.logprobs_L[self.is_sampled_L]

    @property
    def sampled_count(self) -> int:
        """Return the number of tokens that the policy sampled."""
        return int(self.is_sampled_L.sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """The completions of one prompt, all sampled from one policy version."""

    prompt: EncodedPrompt
    completions: tuple[Completion, ...]
    policy_version: int
    is_of_row: bool = False  # the completions are the row's own answer, not the policy's


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredCompletion:
    """A completion with its rewards by name."""

    completion: Completion
    rewards: Mapping[str, RewardValue]
    total: float | None  # weighted sum of the rewards; None: the completion is masked
    is_correct: bool | None  # from the first reward that distinguishes correct answers from wrong ones
    teacher_gaps: tuple[tuple[str, float], ...] = ()  # of each sampled token: its text, ln p - ln q (q: a teacher)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredGroup:
    """A group with its rewards. algorithms/ computes advantages from it."""

    group: Group
    completions: tuple[ScoredCompletion, ...]
