"""Between the turns of a trajectory: what an engine hands over, and what it gets back.

An engine never waits for one answer while it can draw tokens of other rows. What comes back is already tokens and
pictures, so every engine continues from exactly what it sampled.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from tiercel.reward_types import PolicyTurn, RewardValue
from tiercel.types import EncodedPrompt, Observation


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of a trajectory."""

    max_turns: int
    max_tokens: int  # sampled and observed, after the prompt
    begun: int = 0  # tokens of the first turn that the prompt has already


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnReply:
    """What came back after a turn. `observation` is None if the trajectory has ended."""

    turn: PolicyTurn
    observation: Observation | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryEnd:
    """What is known of a trajectory when it has ended."""

    outcome: RewardValue | None  # the environment's own reward; None if it gives none
    failure: str | None = None  # why the environment could not go on


class Dialogue(Protocol):
    """The answers to the turns of one trajectory, one after another."""

    def answer(self, text: str, token_count: int) -> "Future[TurnReply]":
        """Answer what the policy wrote in a turn, without its end token. Never called before the last answer came, nor
        after one without an observation."""

    def fork(self) -> "Dialogue":
        """Return a copy that goes on by itself. Only called between an answer and the next turn."""

    def end(self) -> TrajectoryEnd:
        """End the trajectory: get the environment's reward, and release the environment. Called once."""


class Dialogues(Protocol):
    """A source of dialogues for prompts."""

    def limits_of(self, prompt: EncodedPrompt) -> Limits:
        """Return the limits of a prompt's trajectories."""

    def open(self, prompt: EncodedPrompt, samples: Sequence[int]) -> list[Dialogue]:
        """Begin a trajectory for each of these samples of a prompt, given by their numbers in the group."""
