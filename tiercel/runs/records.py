"""Lines of rollouts/, evaluations/ and tokens/, as JSON. Imports no torch."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, TypeAdapter

from tiercel.reward_types import BoxSpace, CoordinateSpace, ToolCall, opened_by
from tiercel.rewards.answers import extract_answer

Folder = Literal["rollouts", "evaluations"]


def finite(value: Any) -> float | None:
    """Return a JSON number as a float, or None if the value is something else or not finite."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else None


FileName = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Pixels = Annotated[int, Field(ge=1)]
Finite = Annotated[float | None, BeforeValidator(finite)]
Space = Annotated[
    CoordinateSpace | None, BeforeValidator(lambda value: value if value in get_args(CoordinateSpace) else None)
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRecord:
    """An image of a prompt. Its picture, if it was kept, is images/SHA256.webp (.png in older runs); sizes are
    (width, height)."""

    sha256: FileName
    path: str | None
    original_size: tuple[Pixels, Pixels]
    processed_size: tuple[Pixels, Pixels]


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnRecord:
    """A turn of the policy and the answer to it. Its tokens are those of the completion from `start` up to but not
    including `stop`; from there to the next turn, tokens were observed."""

    start: int
    stop: int
    text: str
    calls: tuple[ToolCall, ...]
    answer: str | None  # `<image>` marks each picture; None: there was no answer
    images: tuple[ImageRecord, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRecord:
    """A completion with its rewards. `total` and `advantage` are None if the completion was masked."""

    text: str
    tokens: int  # the number of tokens that the policy sampled
    token_ids: tuple[int, ...]  # with the observed tokens between turns
    seed: int
    is_truncated: Annotated[bool, Field(alias="truncated")]
    rewards: Mapping[str, Finite]
    failures: Mapping[str, str]  # the reason under the reward's name
    total: Finite
    is_correct: Annotated[bool | None, Field(alias="correct")]
    advantage: Finite
    forks: tuple[int, ...] = ()  # first tokens that other completions have too, at each fork of a group
    turns: tuple[TurnRecord, ...] = ()  # with tools or an environment
    teacher: tuple[tuple[str, Finite], ...] = ()  # the sampled tokens: text, ln p - ln q with a teacher's q


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRecord:
    """A prompt and its completions, at least one."""

    coordinate_space: Space = None  # of boxes in the completions; None if the run does not say
    id: str
    index: int  # of the prompt in the global order
    policy_version: int
    prompt: str  # as rendered for the model
    question: str  # the last user turn, as written in the row
    answer: Any
    images: tuple[ImageRecord, ...]
    completions: Annotated[tuple[CompletionRecord, ...], Field(min_length=1)]
    answer_image: int | None = 0  # as in Sample
    answer_space: BoxSpace = "pixels"

    def answer_of(self, completion: CompletionRecord) -> str:
        """Return the answer of one of the completions, by the parser that training uses: what the chat template opened
        before it is part of it."""
        return extract_answer(opened_by(self.prompt, self.question) + completion.text)

    def as_json(self) -> dict[str, Any]:
        """Return the fields in the order of the file. `turns` is written only for trajectories, `forks` only for groups
        that fork, `teacher` only for completions that a teacher has read, and `answer_image` and `answer_space` only if
        they differ from their defaults."""
        written: dict[str, Any] = _FORM.dump_python(self, mode="json", by_alias=True)
        for name, usual in (("answer_image", 0), ("answer_space", "pixels")):
            if written[name] == usual:
                del written[name]
        for completion in written["completions"]:
            for name in ("forks", "turns", "teacher"):
                if not completion[name]:
                    del completion[name]
        return written

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "GroupRecord":
        """Read a group. Raises ValueError if it is malformed."""
        return _FORM.validate_python(record)


_FORM = TypeAdapter(GroupRecord)


def groups_path(run: Path, folder: Folder, step: int) -> Path:
    """Return the file of a run directory that contains a step's groups."""
    return run / folder / f"step-{step:06d}.jsonl"


Values = tuple[Finite, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRecord:
    """The tokens of a completion that the policy sampled, with values in nats. All parts have the same length. None:
    not computed."""

    texts: tuple[str, ...]
    logprobs: Values  # of the engine that sampled them
    entropies: Values | None  # of the learner's distribution
    gaps: Values | None  # the learner's logprob minus the engine's


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTokens:
    """The completions of a prompt, in the order of rollouts/."""

    index: int  # of the prompt in the global order
    completions: tuple[TokenRecord, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the fields in the order of the file."""
        return _TOKENS_FORM.dump_python(self, mode="json")

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "GroupTokens":
        """Read a line. Raises ValueError if it is malformed."""
        return _TOKENS_FORM.validate_python(record)


_TOKENS_FORM = TypeAdapter(GroupTokens)


def tokens_path(run: Path, step: int) -> Path:
    """Return the file of a run directory that contains a step's tokens."""
    return run / "tokens" / f"step-{step:06d}.jsonl"
