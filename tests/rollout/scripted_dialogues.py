"""Dialogues whose answers depend on what the policy wrote, some with pictures, some after a delay."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from zlib import crc32

import torch

from tests.tiny_models import noise_image
from tiercel.models.families.base import Family
from tiercel.reward_types import PolicyTurn, RewardValue
from tiercel.rollout.dialogue import Limits, TrajectoryEnd, TurnReply
from tiercel.types import EncodedPrompt, Observation

Answer = Callable[[int, str], Observation | None]  # of the number of the turn and its text
LIMITS = Limits(max_turns=3, max_tokens=400)


def observation(family: Family, text: str, pictures: int = 0, seed: int = 0) -> Observation:
    """Text, and pictures of odd sizes after it, each with a word behind it."""
    images = tuple(
        family.encode_image(noise_image(40 + 17 * (seed % 5), 90 - 13 * n, seed + n)) for n in range(pictures)
    )
    before, after = family.around_image
    ids = [family.checkpoint.end_token_ids[0], *family.tokenizer(text, add_special_tokens=False)["input_ids"]]
    for image in images:
        ids += family.tokenizer(before, add_special_tokens=False)["input_ids"] if before else []
        ids += family.image_token_ids(image.plan)
        ids += family.tokenizer(after + " Where", add_special_tokens=False)["input_ids"]
    return Observation(token_ids_L=torch.tensor(ids), images=images)


def with_pictures(family: Family) -> Answer:
    """One or two pictures after each turn, and one to four words."""

    def answer(number: int, text: str) -> Observation:
        seed = crc32(f"{number} {text}".encode())
        return observation(family, " the" * (1 + seed % 4), 1 + seed % 2, seed % 7)

    return answer


@dataclass
class ScriptedDialogue:
    """Answers after `delay` seconds, or when an event is set."""

    give: Answer
    delay: float = 0.0
    held_until: threading.Event | None = None
    texts: list[tuple[str, int]] = field(default_factory=list)
    ended: int = 0

    def answer(self, text: str, token_count: int) -> "Future[TurnReply]":
        assert not self.ended
        self.texts.append((text, token_count))
        found = self.give(len(self.texts), text)
        came = None if found is None else f"answer {len(self.texts)}"
        reply = TurnReply(turn=PolicyTurn(text=text, token_count=token_count, answer=came), observation=found)
        future: Future[TurnReply] = Future()
        if self.held_until is not None:
            held = self.held_until
            threading.Thread(target=lambda: (held.wait(30), future.set_result(reply)), daemon=True).start()
        elif self.delay:
            threading.Timer(self.delay, future.set_result, [reply]).start()
        else:
            future.set_result(reply)
        return future

    def fork(self) -> "ScriptedDialogue":
        return replace(self, texts=list(self.texts))

    def end(self) -> TrajectoryEnd:
        self.ended += 1
        return TrajectoryEnd(outcome=RewardValue(value=float(len(self.texts))))


@dataclass
class ScriptedDialogues:
    """`delays`: seconds, taken in turn by the dialogues that are opened."""

    give: Answer
    limits: Limits = LIMITS
    delays: Sequence[float] = (0.0,)
    opened: list[ScriptedDialogue] = field(default_factory=list)
    asked: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    def limits_of(self, prompt: EncodedPrompt) -> Limits:
        return self.limits

    def open(self, prompt: EncodedPrompt, samples: Sequence[int]) -> list[ScriptedDialogue]:
        self.asked.append((prompt.index, tuple(samples)))
        fresh = [
            ScriptedDialogue(give=self.give, delay=self.delays[(len(self.opened) + n) % len(self.delays)])
            for n in range(len(samples))
        ]
        self.opened += fresh
        return fresh
