"""Start the rewards that need a process, a server or a model; each scores a whole batch of completions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from tiercel.config.schema import Reliability
from tiercel.reward_types import RewardValue, Sample
from tiercel.rewards.base import RewardEntry
from tiercel.rewards.external import ByCall, ByJudge, ByModel, Math
from tiercel.rewards.runtime.in_process import PREFIX, InProcessReward
from tiercel.rewards.runtime.judge import JudgeReward
from tiercel.rewards.runtime.user import UserReward
from tiercel.types import EncodedPrompt


class BatchReward(Protocol):
    """A reward that has something to start and to end."""

    def start(self) -> None:
        """Start it. Raises RecipeError with the reason if that fails."""

    def score(self, samples: Sequence[Sample]) -> tuple[RewardValue, ...]: ...
    def close(self) -> None: ...


@runtime_checkable
class AnswerReward(BatchReward, Protocol):
    """A reward that also sees a completion's prompt, with its pictures."""

    def score_answers(self, samples: Sequence[Sample], prompts: Sequence[EncodedPrompt]) -> tuple[RewardValue, ...]: ...


@dataclass(frozen=True, slots=True)
class WithTruth:
    """A reward in its own process, which is passed the right answer as `answer`, whatever column it is in."""

    user: UserReward
    reward: Math

    def start(self) -> None:
        self.user.start()

    def score(self, samples: Sequence[Sample]) -> tuple[RewardValue, ...]:
        truths = [(sample, self.reward.truth(sample)) for sample in samples]
        return self.user.score([replace(sample, answer=truth and truth.value) for sample, truth in truths])

    def close(self) -> None:
        self.user.close()


def _by_model(reward: ByModel, reliability: Reliability) -> BatchReward:
    from tiercel.rewards.runtime.model import ModelReward  # needs torch and transformers, which no other reward does

    return ModelReward(reward)


def _by_call(reward: ByCall, limits: Reliability) -> BatchReward:
    if reward.call.startswith(PREFIX):
        return InProcessReward(reward.call, limits, reward.arguments)
    return UserReward(reward.call, limits, variables=reward.env or (), arguments=reward.arguments)


STARTERS: dict[type[RewardEntry], Callable[[Any, Reliability], BatchReward]] = {
    ByCall: _by_call,
    Math: lambda reward, limits: WithTruth(UserReward("tiercel.rewards.runtime.mathematics:score", limits), reward),
    ByJudge: JudgeReward,
    ByModel: _by_model,
}


def batch_reward(reward: RewardEntry, reliability: Reliability) -> BatchReward | None:
    """Return what scores batches for a reward, not started yet; None if the reward scores by itself."""
    starter = STARTERS.get(type(reward))
    return None if starter is None else starter(reward, reliability)
