"""Between the turns of a trajectory: what an engine hands over, and what it gets back.

An engine never waits for one answer while it can draw tokens of other rows. What comes back is already tokens and
pictures, so every engine goes on from exactly what it sampled.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from tiercel.samples import PolicyTurn, RewardValue
from tiercel.types import EncodedPrompt, Observation


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits a trajectory."""

    max_turns: int
    max_tokens: int  # sampled and observed, after the prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnReply:
    """Holds what came back after a turn. `observation`: None where the trajectory has ended."""

    turn: PolicyTurn
    observation: Observation | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryEnd:
    """Holds what is known of a trajectory when it has ended."""

    outcome: RewardValue | None  # the environment's own reward; None where it gives none
    failure: str | None = None  # why the environment could not go on


class Dialogue(Protocol):
    """Answers the turns of one trajectory, one after the other."""

    def answer(self, text: str, token_count: int) -> "Future[TurnReply]":
        """Take what the policy wrote in a turn, without its end token. Never called before the last answer came, and
        not after one without an observation."""

    def end(self) -> TrajectoryEnd:
        """End the trajectory: take the environment's reward, and set the environment free. Called once."""


class Dialogues(Protocol):
    """Makes the dialogues of prompts."""

    @property
    def limits(self) -> Limits:
        """Return the limits of a trajectory."""

    def open(self, prompt: EncodedPrompt, samples: Sequence[int]) -> list[Dialogue]:
        """Begin a trajectory for each of these samples of a prompt, given by their numbers in the group."""
