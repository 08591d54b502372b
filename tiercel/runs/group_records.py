"""Lines of rollouts/ and evaluations/: a prompt and its completions, as JSON. Imports no torch.

The run writes them, the report and the trackers read them, and `tiercel replay` learns from them again.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tiercel.samples import CoordinateSpace, Size, ToolCall

Folder = Literal["rollouts", "evaluations"]

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRecord:
    """An image of a prompt. Its picture is images/SHA256.png, of `processed_size`; sizes are (width, height)."""

    sha256: str
    path: str | None
    original_size: Size
    processed_size: Size

    def as_json(self) -> dict[str, Any]:
        """Return the fields in the order of the file."""
        return {
            "sha256": self.sha256,
            "path": self.path,
            "original_size": list(self.original_size),
            "processed_size": list(self.processed_size),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "ImageRecord":
        """Read an image. Raises KeyError, TypeError or ValueError where it is malformed."""
        sha256 = str(record["sha256"])
        if not _SHA256.fullmatch(sha256):
            raise ValueError("sha256 names a file; it is 64 hexadecimal digits")
        path = record["path"]
        return cls(
            sha256=sha256,
            path=None if path is None else str(path),
            original_size=_size(record["original_size"]),
            processed_size=_size(record["processed_size"]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRecord:
    """A turn of the policy and what came back. Its tokens are those of the completion from `start` to before `stop`;
    from there to the next turn they were observed."""

    start: int
    stop: int
    text: str
    calls: tuple[ToolCall, ...]
    answer: str | None  # `<image>` marks each picture; None: nothing came back
    images: tuple[ImageRecord, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the fields in the order of the file."""
        return {
            "start": self.start,
            "stop": self.stop,
            "text": self.text,
            "calls": [asdict(call) for call in self.calls],
            "answer": self.answer,
            "images": [image.as_json() for image in self.images],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "TurnRecord":
        """Read a turn. Raises KeyError, TypeError or ValueError where it is malformed."""
        return cls(
            start=int(record["start"]),
            stop=int(record["stop"]),
            text=str(record["text"]),
            calls=tuple(_call(call) for call in record["calls"]),
            answer=None if record["answer"] is None else str(record["answer"]),
            images=tuple(ImageRecord.from_json(image) for image in record["images"]),
        )


def _call(record: Mapping[str, Any]) -> ToolCall:
    failure = record["failure"]
    return ToolCall(
        name=str(record["name"]),
        arguments=dict(record["arguments"]),
        failure=None if failure is None else str(failure),
        is_known=record["is_known"] is True,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRecord:
    """A completion with its rewards. `total` and `advantage` are None where the completion was masked."""

    text: str
    tokens: int  # that the policy drew
    token_ids: tuple[int, ...]  # with those that came back between turns
    seed: int
    is_truncated: bool
    rewards: Mapping[str, float | None]
    failures: Mapping[str, str]  # the reason by the reward's name
    total: float | None
    is_correct: bool | None
    advantage: float | None
    turns: tuple[TurnRecord, ...] = ()  # with tools or an environment

    def as_json(self) -> dict[str, Any]:
        """Return the fields in the order of the file."""
        turns = {"turns": [turn.as_json() for turn in self.turns]} if self.turns else {}
        return {
            "text": self.text,
            "tokens": self.tokens,
            "token_ids": list(self.token_ids),
            "seed": self.seed,
            "truncated": self.is_truncated,
            "rewards": dict(self.rewards),
            "failures": dict(self.failures),
            "total": self.total,
            "correct": self.is_correct,
            "advantage": self.advantage,
            **turns,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "CompletionRecord":
        """Read a completion. Raises KeyError, TypeError or ValueError where it is malformed."""
        correct = record["correct"]
        return cls(
            text=str(record["text"]),
            tokens=int(record["tokens"]),
            token_ids=tuple(map(int, record["token_ids"])),
            seed=int(record["seed"]),
            is_truncated=record["truncated"] is True,
            rewards={str(name): finite(value) for name, value in record["rewards"].items()},
            failures={str(name): str(reason) for name, reason in record["failures"].items()},
            total=finite(record["total"]),
            is_correct=correct if isinstance(correct, bool) else None,
            advantage=finite(record["advantage"]),
            turns=tuple(TurnRecord.from_json(turn) for turn in record.get("turns", ())),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRecord:
    """A prompt and its completions, at least one."""

    coordinate_space: CoordinateSpace | None  # of boxes in the completions; None where the run does not say
    id: str
    index: int  # of the prompt in the global order
    policy_version: int
    prompt: str  # as rendered for the model
    question: str  # the last user turn, as written in the row
    answer: Any
    images: tuple[ImageRecord, ...]
    completions: tuple[CompletionRecord, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the fields in the order of the file."""
        return {
            "coordinate_space": self.coordinate_space,
            "id": self.id,
            "index": self.index,
            "policy_version": self.policy_version,
            "prompt": self.prompt,
            "question": self.question,
            "answer": self.answer,
            "images": [image.as_json() for image in self.images],
            "completions": [completion.as_json() for completion in self.completions],
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "GroupRecord":
        """Read a group. Raises KeyError, TypeError or ValueError where it is malformed."""
        space = record.get("coordinate_space")
        completions = tuple(CompletionRecord.from_json(completion) for completion in record["completions"])
        if not completions:
            raise ValueError("a group has completions")
        return cls(
            coordinate_space=space if space in get_args(CoordinateSpace) else None,
            id=str(record["id"]),
            index=int(record["index"]),
            policy_version=int(record["policy_version"]),
            prompt=str(record["prompt"]),
            question=str(record["question"]),
            answer=record["answer"],
            images=tuple(ImageRecord.from_json(image) for image in record["images"]),
            completions=completions,
        )


def groups_path(run: Path, folder: Folder, step: int) -> Path:
    """Return the file of a run directory that holds a step's groups."""
    return run / folder / f"step-{step:06d}.jsonl"


def finite(value: Any) -> float | None:
    """Return a JSON number as a float; None where it is something else, or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _size(value: Any) -> Size:
    width, height = (int(side) for side in value)
    if width < 1 or height < 1:
        raise ValueError("an image has at least one pixel")
    return width, height
