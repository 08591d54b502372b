"""Samples, groups and recipe entries that the reward tests share."""

from typing import Any

import torch

from tiercel.config.schema import Reliability
from tiercel.reward_types import CoordinateSpace, Sample, SampleImage, Size, Turn
from tiercel.rewards.base import RewardEntry
from tiercel.rewards.registry import BY_NAME, CALL
from tiercel.types import (
    Completion,
    EncodedImage,
    EncodedPrompt,
    Group,
    ImagePlan,
    ImageSource,
    Message,
    RewardValue,
    Row,
    ScoredCompletion,
    ScoredGroup,
)


def sample(
    completion: str = "",
    answer: Any = None,
    *,
    id: str = "row-1",
    columns: dict[str, Any] | None = None,
    original_size: Size = (200, 100),
    processed_size: Size = (400, 50),
    has_image: bool = True,
    token_count: int = 3,
    coordinate_space: CoordinateSpace = "resized_pixels",
    opened: str = "",
    named: dict[str, Any] | None = None,
) -> Sample:
    image = SampleImage(path="a.png", original_size=original_size, processed_size=processed_size)
    return Sample(
        id=id,
        prompt="<image>Where?",
        completion=completion,
        token_count=token_count,
        is_truncated=False,
        answer=answer,
        columns=columns or {},
        images=(image,) if has_image else (),
        coordinate_space=coordinate_space,
        messages=(Turn(role="user", content="<image>Where?"),),
        opened=opened,
        named=named or {},
    )


def group(*texts: str, id: str = "row-1", answer: Any = None, columns: dict[str, Any] | None = None) -> Group:
    """Completions of a row with one image of 200 x 100, resized to 400 x 50; a token per character."""
    row = Row(
        id=id,
        messages=(
            Message(role="system", content="Be brief."),
            Message(role="user", content="<image>Hello"),
            Message(role="assistant", content="Hello"),
            Message(role="user", content="Where is the 7?"),
        ),
        images=(ImageSource(path="a.png"),),
        answer=answer,
        columns=columns or {},
        file="rows.jsonl",
        line=1,
    )
    plan = ImagePlan(original_size=(200, 100), processed_size=(400, 50), grid=(1, 1, 1), token_count=1)
    image = EncodedImage(sha256="0" * 64, plan=plan, views=(torch.zeros(50, 400, 3, dtype=torch.uint8),))
    prompt = EncodedPrompt(
        row=row,
        index=0,
        text="",
        token_ids_P=torch.zeros(4, dtype=torch.int64),
        positions_DP=torch.zeros(1, 4, dtype=torch.int64),
        images=(image,),
    )
    return Group(prompt=prompt, completions=tuple(completion(text) for text in texts), policy_version=0)


def completion(text: str) -> Completion:
    return Completion(
        token_ids_L=torch.zeros(len(text), dtype=torch.int64),
        logprobs_L=torch.zeros(len(text)),
        text=text,
        is_truncated=False,
        seed=0,
    )


def scored_group(*scored: ScoredCompletion) -> ScoredGroup:
    return ScoredGroup(group=group(*(each.completion.text for each in scored)), completions=scored)


def scored(total: float | None, is_correct: bool | None = None, **rewards: RewardValue) -> ScoredCompletion:
    return ScoredCompletion(completion=completion("x"), rewards=rewards, total=total, is_correct=is_correct)


def reward(**keys: Any) -> RewardEntry:
    return BY_NAME[keys.get("name", CALL)](**keys)


def limits(timeout: float = 30.0, **keys: float) -> Reliability:
    """What a reward's process may take; `timeout` in seconds."""
    return Reliability(reward_timeout=timeout, **keys)
