"""The reward that an environment gives."""

from typing import ClassVar, Literal

from tiercel.rewards.entry import Reward
from tiercel.samples import Sample


class OfEnvironment(Reward):
    """what `get_reward` of rollout.environment answers; it does not apply where that answers None"""

    name: Literal["environment"] = "environment"
    reads: ClassVar[str] = "the environment's state at the end"

    def score(self, sample: Sample) -> float | None:
        return None if sample.outcome is None else sample.outcome.value
