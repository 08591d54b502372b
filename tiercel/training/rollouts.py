"""Completions for one step after the other; with `rollout.lookahead: 1` the next step's are sampled while the learner
works, from the policy that the learner starts from."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from tiercel.config.schema import GrpoRecipe
from tiercel.data.loader import StepBatch
from tiercel.distributed.ranks import Ranks
from tiercel.rollout.drawing import sampling_seed
from tiercel.rollout.pending import PendingGroup
from tiercel.rollout.sampler import Sampler, sampling_params
from tiercel.rollout.vllm_server import ServerSampler
from tiercel.training.spreading import drawn_by_all
from tiercel.types import EncodedPrompt, Group


class Rollouts:
    """All ranks make the same calls. `restored`: groups that a checkpoint kept, by their prompt's global index."""

    def __init__(
        self, sampler: Sampler, recipe: GrpoRecipe, ranks: Ranks, restored: Mapping[int, PendingGroup] | None = None
    ):
        self.sampler = sampler
        self.ahead = sampler if recipe.rollout.lookahead and isinstance(sampler, ServerSampler) else None
        self.params = sampling_params(recipe.rollout)
        self.seed = recipe.train.seed
        self.ranks = ranks
        engine, shared = recipe.rollout.engine, recipe.rollout.vllm.tensor_parallel > 1
        self.has_engine_per_rank = engine == "local" or (engine == "vllm" and not shared)
        self._restored = dict(restored or {})
        self._begun: Future[tuple[Group, ...]] | None = None
        self._ready: dict[int, Group] = {}

    def of(self, prompts: Sequence[EncodedPrompt]) -> tuple[Group, ...]:
        """A step's groups, sampled now where they were not before."""
        for prompt in prompts:
            if (kept := self._restored.pop(prompt.index, None)) is not None:
                self._ready[prompt.index] = kept.with_prompt(prompt)
        missing = [prompt for prompt in prompts if prompt.index not in self._ready]
        if self.ranks.any(bool(missing)):
            with self.sampler.awake():
                sampled = self._sampled(missing)
            self._ready |= {group.prompt.index: group for group in sampled}
        groups = tuple(self._ready[prompt.index] for prompt in prompts)
        self._ready.clear()
        return groups

    def begin(self, prompts: Sequence[EncodedPrompt]) -> None:
        """Sample the next step's groups in the background, where the recipe says so."""
        if self.ahead is not None and prompts:
            self._begun = self.ahead.begin(prompts, self.params, self._seeds(prompts))

    def finish(self) -> None:
        """Wait for what was begun; then the policy may change."""
        if self.ahead is None:
            return
        begun, self._begun = self._begun, None
        groups = self.ranks.together(lambda: () if begun is None else begun.result())
        self._ready |= {group.prompt.index: group for group in groups}

    def pending(self) -> list[PendingGroup]:
        """The groups of the next step that are there already, for a checkpoint."""
        return [PendingGroup.of(group) for group in self._ready.values()]

    def with_next(
        self, batches: Iterator[StepBatch[EncodedPrompt]]
    ) -> Iterator[tuple[StepBatch[EncodedPrompt], Sequence[EncodedPrompt]]]:
        """Each step's batch with the prompts of the next, which are asked for only where they are sampled ahead."""
        if self.ahead is None:
            yield from ((batch, ()) for batch in batches)
            return
        current = next(batches, None)
        while current is not None:
            following = next(batches, None)
            yield current, following.prompts if following is not None else ()
            current = following

    def _sampled(self, prompts: Sequence[EncodedPrompt]) -> tuple[Group, ...]:
        """With an engine on each rank, all ranks draw, however few the prompts are."""
        if self.has_engine_per_rank:
            return drawn_by_all(self.ranks, prompts, self.params.group_size, self._draw)
        return self.ranks.together(partial(self._draw, prompts, range(self.params.group_size)))

    def _draw(self, prompts: Sequence[EncodedPrompt], numbers: range) -> tuple[Group, ...]:
        seeds = [seed + numbers.start for seed in self._seeds(prompts)]
        return self.sampler.sample(prompts, replace(self.params, group_size=len(numbers)), seeds)

    def _seeds(self, prompts: Sequence[EncodedPrompt]) -> list[int]:
        return [sampling_seed(self.seed, prompt.index) for prompt in prompts]
