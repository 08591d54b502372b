"""What every engine offers, and how a completion is asked for."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tiercel.config.schema import Rollout
from tiercel.types import EncodedPrompt, Group


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to sample; `greedy` takes the likeliest token and ignores temperature, top-p and top-k."""

    group_size: int
    min_new_tokens: int
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: tuple[str, ...]
    greedy: bool


def sampling_params(rollout: Rollout) -> SamplingParams:
    """As the recipe says."""
    return SamplingParams(
        group_size=rollout.group_size,
        min_new_tokens=rollout.min_new_tokens,
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=rollout.stop,
        greedy=False,
    )


def greedy_params(rollout: Rollout) -> SamplingParams:
    """One greedy completion per prompt, for evaluation and prediction."""
    return SamplingParams(
        group_size=1,
        min_new_tokens=rollout.min_new_tokens,
        max_new_tokens=rollout.max_new_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        stop=rollout.stop,
        greedy=True,
    )


class Sampler(Protocol):
    """An engine that completes prompts. With ranks all of them make the same calls."""

    shares_weights: bool  # it samples with the trainer's own weights, and needs no adapter directory

    def load_policy(self, version: int, adapter_directory: Path | None) -> None:
        """Sample from this version from now on. The directory's name is the policy's, and stays until the next call."""

    def require_usable(self, prompt: EncodedPrompt) -> None:
        """Raises EnvironmentProblem where the engine was started otherwise than the trainer needs it."""

    def awake(self) -> AbstractContextManager[None]:
        """Inside it can sample; outside it leaves memory to the learner."""

    def sample(
        self, prompts: Sequence[EncodedPrompt], params: SamplingParams, seeds: Sequence[int]
    ) -> tuple[Group, ...]:
        """`params.group_size` completions of each prompt, sample i of a prompt drawn with its seed + i."""

    def sample_everywhere(
        self, prompts: Sequence[EncodedPrompt], params: SamplingParams, seeds: Sequence[int]
    ) -> tuple[Group, ...]:
        """Like `sample`, from each engine that stands behind this one."""

    def metrics(self) -> dict[str, float]:
        """What to say of the engine since the last call; summed over ranks."""

    def close(self) -> None:
        """Give back what it holds."""
