"""The completion of a sample whose turns are answered, built for every engine. Shape suffixes: docs/shapes.md."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from copy import copy
from dataclasses import replace

import torch
from torch import Tensor

from tiercel.models.families.base import Family
from tiercel.reward_types import PolicyTurn
from tiercel.rollout.dialogue import Dialogue, Dialogues, Limits, TrajectoryEnd, TurnReply
from tiercel.rollout.sampler import SamplingParams
from tiercel.types import Completion, EncodedImage, EncodedPrompt, Trajectory

BEAT_SECONDS = 1.0  # while an engine waits for answers
THREADS = 64  # trajectories that end at a time


def written_text(family: Family, token_ids: Sequence[int]) -> str:
    """Decode what the policy wrote, without its end token."""
    has_end = token_ids[-1] in family.checkpoint.end_token_ids
    return family.tokenizer.decode(list(token_ids[:-1] if has_end else token_ids))


def given_completion(family: Family, token_ids_L: Tensor) -> Completion:
    """Make a completion of an answer that no engine has sampled, so its logprobs are not known."""
    return Completion(
        token_ids_L=token_ids_L,
        logprobs_L=torch.full((len(token_ids_L),), torch.nan),
        text=written_text(family, token_ids_L.tolist()),
        is_truncated=False,
        seed=0,
    )


def stop_reach(stop: Sequence[str]) -> int:
    """Return how many of the last tokens can have a stop string that the last one completes."""
    return max(len(text.encode()) for text in stop) + 4  # every token is a byte or more


def completes_a_stop(family: Family, rows: Sequence[Sequence[int]], stop: Sequence[str]) -> list[bool]:
    """Return for each row of tokens whether the last one completes a stop string."""
    texts = family.tokenizer.batch_decode([list(ids[-stop_reach(stop) :]) for ids in rows])
    return [any(each in text for each in stop) for text in texts]


class TrajectoryBuilder:
    """The turns of one sample, with what comes back after each. `max_new_tokens` is of a turn."""

    def __init__(
        self,
        family: Family,
        prompt: EncodedPrompt,
        dialogue: Dialogue,
        limits: Limits,
        max_new_tokens: int,
        seed: int,
    ):
        self.family = family
        self.prompt = prompt
        self.dialogue = dialogue
        self.limits = limits
        self.max_new_tokens = max_new_tokens
        self.seed = seed
        self.token_ids: list[int] = []  # after the prompt
        self.logprobs: list[float] = []
        self.is_sampled: list[bool] = []
        self.images: list[EncodedImage] = []  # that came back
        self.observed: tuple[EncodedImage, ...] = ()  # the newest of them: those that came back after the last turn
        self.turns: list[PolicyTurn] = []
        self.text = ""
        self.is_truncated = False
        self.ending: TrajectoryEnd | None = None
        self.forks: list[int] = []  # tokens before each place where it was forked

    @property
    def budget(self) -> int:
        """Return how many tokens the next turn may have."""
        return min(self.max_new_tokens, self.limits.max_tokens - len(self.token_ids))

    @property
    def begun(self) -> int:
        """Return how many tokens of the next turn are there already."""
        sampled = next((n for n, each in enumerate(reversed(self.is_sampled)) if not each), len(self.is_sampled))
        return sampled + (self.limits.begun if sampled == len(self.is_sampled) else 0)

    def least(self, min_new_tokens: int) -> int:
        """Return how many tokens the next turn must have at least, of the `min_new_tokens` of a whole turn."""
        return min(max(0, min_new_tokens - self.begun), self.budget)

    @property
    def has_end(self) -> bool:
        """Return whether the last token ends a turn."""
        return self.token_ids[-1] in self.family.checkpoint.end_token_ids

    def add_turn(
        self, token_ids: Sequence[int], logprobs: Sequence[float], *, is_truncated: bool
    ) -> Future[TurnReply] | None:
        """Add what the policy wrote in a turn. Returns the future reply, or None if the turn was truncated, which ends
        the trajectory."""
        self._add(token_ids, logprobs, is_sampled=True)
        self.text = written_text(self.family, token_ids)
        self.is_truncated = is_truncated
        if is_truncated:
            self.turns.append(PolicyTurn(text=self.text, token_count=len(token_ids)))
            return None
        return self.dialogue.answer(self.text, len(token_ids))

    def add_reply(self, reply: TurnReply) -> bool:
        """Add what came back after a turn. Returns whether another turn follows. If there are no turns left, or no room
        for a token after the observation, the observation is dropped and the trajectory is truncated."""
        self.turns.append(reply.turn)
        if reply.observation is None:
            return False
        token_ids = reply.observation.token_ids_L.tolist()
        if token_ids[:1] == self.token_ids[-1:]:  # else a stop string, or another end token, ended the turn
            del token_ids[0]
        has_room = len(self.token_ids) + len(token_ids) < self.limits.max_tokens
        self.is_truncated = len(self.turns) == self.limits.max_turns or not has_room
        if not self.is_truncated:
            self._add(token_ids, [0.0] * len(token_ids), is_sampled=False)
            self.observed = reply.observation.images
            self.images += self.observed
        return not self.is_truncated

    def so_far(self) -> EncodedPrompt:
        """Return the prompt with everything that follows it, as the prompt of the next turn."""
        token_ids_P = torch.cat([self.prompt.token_ids_P, torch.tensor(self.token_ids, dtype=torch.int64)])
        images = (*self.prompt.images, *self.images)
        return replace(
            self.prompt,
            token_ids_P=token_ids_P,
            positions_DP=self.family.positions(token_ids_P, [image.plan for image in images]),
            images=images,
            picture_spans=self.family.picture_spans(token_ids_P),
        )

    def remaining(self) -> Limits:
        """Return the limits of what follows."""
        return Limits(
            max_turns=self.limits.max_turns - len(self.turns),
            max_tokens=self.limits.max_tokens - len(self.token_ids),
            begun=self.begun,
        )

    def forked(self, dialogue: Dialogue, seed: int) -> "TrajectoryBuilder":
        """Return a copy that goes on by itself."""
        made = copy(self)
        made.dialogue, made.seed, made.forks = dialogue, seed, [*self.forks, len(self.token_ids)]
        for name in ("token_ids", "logprobs", "is_sampled", "images", "turns"):
            setattr(made, name, list(getattr(self, name)))
        return made

    def add_rest(self, rest: Completion) -> None:
        """Add all that follows, sampled as a completion of `so_far`."""
        assert rest.trajectory is not None
        self.token_ids += rest.token_ids_L.tolist()
        self.logprobs += rest.logprobs_L.tolist()
        self.is_sampled += rest.trajectory.is_sampled_L.tolist()
        self.images += rest.trajectory.images
        self.turns += rest.trajectory.turns
        self.text, self.is_truncated = rest.text, rest.is_truncated
        self.ending = TrajectoryEnd(outcome=rest.trajectory.outcome, failure=rest.trajectory.failure)

    def completion(self) -> Completion:
        """End the dialogue, if it has not ended, and return the completion of all turns."""
        ending = self.ending or self.dialogue.end()
        token_ids_L = torch.tensor(self.token_ids)
        return Completion(
            token_ids_L=token_ids_L,
            logprobs_L=torch.tensor(self.logprobs, dtype=torch.float32),
            text=self.text,
            is_truncated=self.is_truncated,
            seed=self.seed,
            forks=tuple(self.forks),
            trajectory=Trajectory(
                is_sampled_L=torch.tensor(self.is_sampled),
                positions_DL=self.so_far().positions_DP[:, len(self.prompt.token_ids_P) :].clone(),
                images=tuple(self.images),
                picture_spans=self.family.picture_spans(token_ids_L),
                turns=tuple(self.turns),
                outcome=ending.outcome,
                failure=ending.failure,
            ),
        )

    def _add(self, token_ids: Sequence[int], logprobs: Sequence[float], *, is_sampled: bool) -> None:
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.is_sampled += [is_sampled] * len(token_ids)


def awaited(reply: Future[TurnReply], beat: Callable[[], None]) -> TurnReply:
    """Wait for the answer to a turn. `beat` is called meanwhile, every second."""
    while wait([reply], BEAT_SECONDS).not_done:
        beat()
    return reply.result()


def ended_trajectories(builders: Sequence[TrajectoryBuilder], beat: Callable[[], None]) -> list[Completion]:
    """End the trajectories, all at once, because an environment may take long to give their rewards. `beat` is called
    meanwhile, every second."""
    with ThreadPoolExecutor(THREADS, thread_name_prefix="ending") as threads:
        ending = [threads.submit(builder.completion) for builder in builders]
        while wait(ending, BEAT_SECONDS).not_done:
            beat()
    return [each.result() for each in ending]


def begun_trajectories(
    family: Family,
    prompts: Sequence[EncodedPrompt],
    params: SamplingParams,
    seeds: Sequence[int],
    dialogues: Dialogues,
) -> list[list[TrajectoryBuilder]]:
    """Begin the trajectories of each prompt."""
    return [
        [
            TrajectoryBuilder(family, prompt, dialogue, limits, params.max_new_tokens, seed + number)
            for number, dialogue in enumerate(dialogues.open(prompt, range(params.group_size)))
        ]
        for prompt, seed in zip(prompts, seeds, strict=True)
        for limits in (dialogues.limits_of(prompt),)
    ]
