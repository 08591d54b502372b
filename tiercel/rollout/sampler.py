"""The methods of every engine, and the parameters of sampling."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Protocol, runtime_checkable

from tiercel.config.schema import Rollout
from tiercel.models.families.base import Family
from tiercel.rollout.dialogue import Dialogues
from tiercel.types import EncodedPrompt, Group


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """The parameters of sampling. `greedy` takes the likeliest token and ignores temperature, top-p and top-k."""

    group_size: int = 1
    min_new_tokens: int = 0
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    greedy: bool = False
    branches: tuple[int, ...] = ()  # as in the recipe; engines sample one part after another
    branch_at: str | None = None

    @property
    def first_parts(self) -> int:
        """Return how many parts of a group follow its prompt directly: completions, if they do not fork."""
        return self.branches[0] if self.branches else self.group_size

    def with_first_parts(self, count: int) -> "SamplingParams":
        """Return parameters for groups of so many first parts."""
        branches = (count, *self.branches[1:]) if self.branches else ()
        return replace(self, branches=branches, group_size=prod(branches) if branches else count)


def sampling_params(rollout: Rollout) -> SamplingParams:
    """Return the parameters of the recipe."""
    return SamplingParams(
        group_size=rollout.group_size,
        min_new_tokens=rollout.min_new_tokens,
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop=rollout.stop,
        branches=rollout.branches,
        branch_at=rollout.branch_at,
    )


def greedy_params(rollout: Rollout) -> SamplingParams:
    """Return the parameters of one greedy completion per prompt, for evaluation and prediction."""
    params = replace(sampling_params(rollout), group_size=1, branches=(), branch_at=None)
    return replace(params, temperature=1.0, top_p=1.0, top_k=0, greedy=True)


class Sampler(Protocol):
    """An engine that completes prompts. All ranks make the same calls."""

    family: Family
    shares_weights: bool  # the engine uses the trainer's weights and needs no adapter directory

    def load_policy(self, version: int, adapter_directory: Path | None) -> None:
        """Sample from this version from now on. The directory has the name of the policy, and must stay until the next
        call."""

    def awake(self) -> AbstractContextManager[None]:
        """Wrap sampling. Outside, the engine may give its memory to the learner."""

    def sample(
        self,
        prompts: Sequence[EncodedPrompt],
        params: SamplingParams,
        seeds: Sequence[int],
        dialogues: Dialogues | None = None,
    ) -> tuple[Group, ...]:
        """Sample `params.group_size` completions of each prompt. Sample i of a prompt is drawn with its seed + i.
        `dialogues` answers after each turn; None: a completion has one turn."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of the engine since the last call. They are summed over ranks."""

    def close(self) -> None:
        """Free the engine's resources."""


@runtime_checkable
class GatedSampler(Sampler, Protocol):
    """An engine with weights of its own, which the gate compares with the trainer's before the first step."""

    def require_usable(self, prompt: EncodedPrompt) -> None:
        """Raise EnvironmentProblem if the engine was started with other options than the trainer needs."""

    def sample_everywhere(
        self, prompts: Sequence[EncodedPrompt], params: SamplingParams, seeds: Sequence[int]
    ) -> tuple[Group, ...]:
        """Sample the same prompts as `sample` from each server behind this engine."""
