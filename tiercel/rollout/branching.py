"""Groups that fork: first turns or first thoughts, with several continuations each. They are sampled part by part.

The parts of a level, over all prompts, are one call of the engine: its prompts end with what was sampled before. So an
engine needs to know nothing of forks. A first turn that ended the trajectory, or a thought without its stop string,
cannot be continued. It then stands for all of its continuations, so that each completion has the policy's own
distribution.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from math import prod

import torch

from tiercel.reward_types import PolicyTurn
from tiercel.rollout.dialogue import Dialogue, Dialogues, Limits, TrajectoryEnd, TurnReply
from tiercel.rollout.sampler import Sampler, SamplingParams
from tiercel.rollout.token_sampling import sampling_seed
from tiercel.rollout.trajectory import TrajectoryBuilder, begun_trajectories, written_text
from tiercel.types import Completion, EncodedPrompt, Group, Observation

NOTHING = Observation(token_ids_L=torch.empty(0, dtype=torch.int64))


@dataclass(frozen=True, kw_only=True, slots=True)
class Thoughts:
    """The dialogue of a completion of one turn: after a part that ends with `at` it goes on with nothing between."""

    at: str | None  # None: it never goes on
    stop: tuple[str, ...]
    limits: Limits

    def limits_of(self, prompt: EncodedPrompt) -> Limits:
        return self.limits

    def open(self, prompt: EncodedPrompt, samples: Sequence[int]) -> list[Dialogue]:
        return [self for _ in samples]

    def answer(self, text: str, token_count: int) -> "Future[TurnReply]":
        goes_on = self.at is not None and self.at in text and not any(stop in text for stop in self.stop)
        reply: Future[TurnReply] = Future()
        turn = PolicyTurn(text=text, token_count=token_count)
        reply.set_result(TurnReply(turn=turn, observation=NOTHING if goes_on else None))
        return reply

    def fork(self) -> Dialogue:
        return self

    def end(self) -> TrajectoryEnd:
        return TrajectoryEnd(outcome=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fork:
    """A place from which several completions go on."""

    prompt: EncodedPrompt  # with all tokens before
    seed: int  # of the first
    builders: list[TrajectoryBuilder]
    after: "list[_Fork | Completion]" = field(default_factory=list)  # of each builder, once it is sampled

    def leaves(self, counts: Sequence[int]) -> Iterator[Completion]:
        """Yield the completions. `counts`: of each builder of this fork, of the forks after it and so on."""
        for each in self.after:
            if isinstance(each, _Fork):
                yield from each.leaves(counts[1:])
            else:
                missing = [len(each.token_ids_L)] * (len(counts) - 1)
                yield from [replace(each, forks=(*each.forks, *missing))] * counts[0]


class _Parts:
    """The dialogues of what goes on from forks: the builders' own, or those of a single part."""

    def __init__(self, forks: Sequence[_Fork], has_answers: bool):
        self._builders = {id(fork.prompt): fork.builders for fork in forks}
        self._has_answers = has_answers

    def limits_of(self, prompt: EncodedPrompt) -> Limits:
        builder = self._builders[id(prompt)][0]
        limits = builder.remaining()
        return limits if self._has_answers else replace(limits, max_tokens=builder.budget)

    def open(self, prompt: EncodedPrompt, samples: Sequence[int]) -> list[Dialogue]:
        if self._has_answers:
            return [builder.dialogue for builder in self._builders[id(prompt)]]
        return Thoughts(at=None, stop=(), limits=self.limits_of(prompt)).open(prompt, samples)


def sample_branches(
    sampler: Sampler,
    prompts: Sequence[EncodedPrompt],
    params: SamplingParams,
    seeds: Sequence[int],
    dialogues: Dialogues | None = None,
) -> tuple[Group, ...]:
    """Sample groups that fork as `params.branches` says; completions are in the order of a depth-first walk. First part
    i of a prompt is drawn with its seed + i; continuation i of a part with seed(part's seed, level) + i. All ranks
    make the same calls of the engine."""
    branches, stop = params.branches, params.stop
    plain = replace(params, branches=(), branch_at=None, group_size=branches[0])
    limits = Limits(max_turns=len(branches), max_tokens=params.max_new_tokens)
    answers = dialogues or Thoughts(at=params.branch_at, stop=stop, limits=limits)
    begun = begun_trajectories(sampler.family, prompts, plain, seeds, answers)
    roots = [_Fork(prompt=p, seed=s, builders=b) for p, s, b in zip(prompts, seeds, begun, strict=True)]
    forks, versions = roots, [0] * len(prompts)
    for level, width in enumerate(branches):
        is_last = level + 1 == len(branches)
        stops = stop if is_last or params.branch_at is None else (*stop, params.branch_at)
        groups = sampler.sample(
            [fork.prompt for fork in forks],
            replace(plain, group_size=width, stop=stops),
            [fork.seed for fork in forks],
            _Parts(forks, has_answers=is_last and dialogues is not None),
        )
        if level == 0:
            versions = [group.policy_version for group in groups]
        if is_last:
            _finish(forks, groups)
        else:
            forks = _next_forks(forks, groups, level + 1, branches[level + 1])
    counts = [prod(branches[level + 1 :]) for level in range(len(branches))]
    return tuple(
        Group(prompt=root.prompt, completions=tuple(root.leaves(counts)), policy_version=version)
        for root, version in zip(roots, versions, strict=True)
    )


def _finish(forks: Sequence[_Fork], groups: Sequence[Group]) -> None:
    """Add the last parts."""
    for fork, group in zip(forks, groups, strict=True):
        for builder, rest in zip(fork.builders, group.completions, strict=True):
            builder.add_rest(rest)
            fork.after.append(_whole(builder))


def _next_forks(forks: Sequence[_Fork], groups: Sequence[Group], level: int, width: int) -> list[_Fork]:
    """Add parts, get the answers to them, and return the forks after those that go on."""
    asked = [
        (fork, builder, builder.add_turn(part.token_ids_L.tolist(), part.logprobs_L.tolist(), is_truncated=is_cut))
        for fork, group in zip(forks, groups, strict=True)
        for builder, part in zip(fork.builders, group.completions, strict=True)
        for is_cut in (part.is_truncated,)
    ]
    found: list[_Fork] = []
    for fork, builder, reply in asked:
        if reply is None or not builder.add_reply(reply.result()) or _is_over(builder):
            fork.after.append(_whole(builder))
            continue
        copies = [builder.dialogue.fork() for _ in range(width - 1)]
        seed = sampling_seed(builder.seed, level)
        builders = [builder.forked(each, seed + number) for number, each in enumerate((builder.dialogue, *copies))]
        found.append(_Fork(prompt=builder.so_far(), seed=seed, builders=builders))
        fork.after.append(found[-1])
    return found


def _is_over(builder: TrajectoryBuilder) -> bool:
    """Return whether a completion of one turn has its end, whatever its text says."""
    return isinstance(builder.dialogue, Thoughts) and builder.has_end


def _whole(builder: TrajectoryBuilder) -> Completion:
    completion = builder.completion()
    if not isinstance(builder.dialogue, Thoughts):
        return completion
    return replace(completion, trajectory=None, text=written_text(builder.family, builder.token_ids))
