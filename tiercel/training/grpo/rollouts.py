"""Completions of one step after another, with their rewards. With `rollout.lookahead`, those of later steps are sampled
while the learner works, from the policy that the learner starts from."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from tiercel.algorithms import advantage_of
from tiercel.algorithms.section import Algorithm
from tiercel.config.conflicts.rewards import unlearnt_rewards
from tiercel.config.schema import GrpoRecipe
from tiercel.data.order import indices_of_try
from tiercel.distributed.ranks import Ranks
from tiercel.environments.dialogues import EnvironmentDialogues
from tiercel.log import logger
from tiercel.rewards.runtime.metrics import NO_FAILURES, count_failures
from tiercel.rewards.runtime.scorer import Scorer
from tiercel.rollout.pending import PendingGroup
from tiercel.rollout.sampler import Sampler, sampling_params
from tiercel.rollout.token_sampling import sampling_seed
from tiercel.rollout.vllm.server import ServerSampler
from tiercel.runs.directory import RunDirectory
from tiercel.runs.progress import entered
from tiercel.training.checkpoints import pending_of
from tiercel.training.grpo.completion_sampling import CompletionSampler, open_dialogues
from tiercel.training.grpo.engine_logprob_check import check_engine_logprobs
from tiercel.training.grpo.group_sharding import sample_on_all_ranks
from tiercel.training.grpo.journal import journal_of, keep_in_journal
from tiercel.training.grpo.offpolicy_answers import answered_groups, learnt_prompt_encoder
from tiercel.training.grpo.policy_sync import PolicySync, open_sampler
from tiercel.training.session import Session
from tiercel.training.step import Step
from tiercel.training.step_batches import StepBatches
from tiercel.training.trainer import Trainer
from tiercel.types import EncodedPrompt, Group, ScoredGroup


@contextmanager
def open_rollouts(
    recipe: GrpoRecipe, session: Session, trainer: Trainer
) -> Iterator[tuple[StepBatches[EncodedPrompt], "Rollouts"]]:
    """Start the rewards, the workers that encode rows, and the engine, and stop them at the end."""
    for line in unlearnt_rewards(recipe):
        logger.warning(line)
    rewards = Scorer(recipe.rewards, recipe.reliability, trainer.family.coordinate_space)
    sampling = open_sampler(recipe, trainer, session.run, session.rows.every)
    for_teacher = None if trainer.teacher is None else trainer.teacher.encode
    with (
        entered(rewards, "starting the rewards") as scorer,
        open_dialogues(recipe, trainer.family) as dialogues,
        StepBatches(session, learnt_prompt_encoder(trainer.family, recipe, for_teacher)) as rows,
        entered(sampling, f"starting the {recipe.rollout.engine} engine") as sync,
    ):
        restored = pending_of(session.found) | journal_of(session.run.path, session.start)
        yield rows, Rollouts(recipe, session.ranks, sync, scorer, dialogues, restored)


class Rollouts:
    """Groups of completions, step by step. All ranks make the same calls. `restored` has groups that a checkpoint kept,
    by their prompt's global index."""

    def __init__(
        self,
        recipe: GrpoRecipe,
        ranks: Ranks,
        sync: PolicySync,
        scorer: Scorer,
        dialogues: EnvironmentDialogues | None = None,
        restored: Mapping[int, PendingGroup] | None = None,
    ):
        self.sync = sync
        self.scorer = scorer
        self.completion_sampler = CompletionSampler(sampler=sync.sampler, dialogues=dialogues)
        self.ranks = ranks
        self.recipe = recipe
        self._ahead = self.sampler if recipe.rollout.lookahead and isinstance(self.sampler, ServerSampler) else None
        self._params = sampling_params(recipe.rollout)
        engine, shared = recipe.rollout.engine_kind, recipe.rollout.vllm.tensor_parallel > 1
        self._has_engine_per_rank = engine.shares_weights or (engine.is_beside and not shared)
        self._restored = dict(restored or {})
        self._begun = deque[Future[tuple[Group, ...]]]()  # of this rank's prompts of the next steps, in their order
        self._ready: dict[int, Group] = {}

    def check_engine_logprobs(self, trainer: Trainer, step: Step) -> None:
        """Raise EnvironmentProblem, on all ranks, if the engine and the trainer disagree on this step's prompts."""
        with step.untimed_phase("parity"):
            check_engine_logprobs(self.sync, trainer, self.recipe, step)

    @property
    def sampler(self) -> Sampler:
        return self.sync.sampler

    @property
    def steps_ahead(self) -> int:
        """Return how many later steps are sampled while the learner works."""
        return 0 if self._ahead is None else self.recipe.rollout.lookahead

    def groups_for(self, prompts: Sequence[EncodedPrompt]) -> tuple[Group, ...]:
        """Return the groups of a step's prompts, sampling those that are not there yet."""
        prompts = self.ranks.run_on_all(partial(self.completion_sampler.begun, prompts))
        for prompt in prompts:
            kept = self._restored.pop(prompt.index, None)
            if kept is not None and (group := kept.with_prompt(prompt)) is not None:
                self._ready[prompt.index] = group
        missing = [prompt for prompt in prompts if prompt.index not in self._ready]
        if self.ranks.all_reduce_any(bool(missing)):
            with self.sampler.awake():
                sampled = self._sampled(missing)
            self._ready |= {group.prompt.index: group for group in sampled}
        return tuple(self._ready.pop(prompt.index) for prompt in prompts)

    def add_ready(self, groups: Sequence[Group]) -> None:
        """Add groups of the next step that need no sampling."""
        for group in groups:
            self._restored.pop(group.prompt.index, None)
            self._ready[group.prompt.index] = group

    def keep_for_resume(self, run: RunDirectory, step: int, groups: Sequence[Group]) -> None:
        """Keep the groups of a step whose turns were answered, in case the run is killed before it has learnt them."""
        if self.recipe.rollout.has_turns:
            rank, world_size = self.ranks.rank, self.ranks.world_size
            self.ranks.run_on_all(partial(keep_in_journal, run.path, rank, step, groups, world_size))

    def begin_lookahead(self, upcoming: Sequence[Sequence[EncodedPrompt]]) -> None:
        """Sample the groups of later steps in the background. `upcoming` has the prompts of each."""
        if self._ahead is None:
            return
        for prompts in upcoming:
            prompts = [prompt for prompt in prompts if prompt.index not in self._restored]
            self._begun.append(self._ahead.begin(prompts, self._params, self._seeds(prompts)))

    def wait_for_lookahead(self) -> None:
        """Wait for the groups of the next step; after that, the policy may change."""
        if self._ahead is None:
            return
        begun = self._begun.popleft() if self._begun else None
        groups = self.ranks.run_on_all(lambda: () if begun is None else begun.result())
        self._ready |= {group.prompt.index: group for group in groups}

    def pending(self) -> list[PendingGroup]:
        """Return the groups of the next step that are already there, for a checkpoint."""
        return [PendingGroup.of(group) for group in self._ready.values()]

    def score(self, groups: Sequence[Group]) -> tuple[ScoredGroup, ...]:
        """Score this rank's groups. Raises TrainingError, on all ranks, if too many completions of all ranks have a
        failed reward."""
        scored = self.ranks.run_on_all(partial(self.scorer.score, groups))
        failures = sum(self.ranks.all_gather(count_failures(scored)), NO_FAILURES)
        most = self.recipe.reliability.max_failed_reward_fraction
        self.ranks.run_on_all(lambda: failures.require_at_most(most))
        return scored

    def _sampled(self, prompts: Sequence[EncodedPrompt]) -> tuple[Group, ...]:
        """Draw the groups, on all ranks if each has an engine, however few the prompts are."""
        count = self._params.first_parts
        if self._has_engine_per_rank:
            return sample_on_all_ranks(self.ranks, prompts, count, self._draw)
        return self.ranks.run_on_all(partial(self._draw, prompts, range(count)))

    def _draw(self, prompts: Sequence[EncodedPrompt], numbers: range) -> tuple[Group, ...]:
        """Sample the completions with these indices in each group. With branches these are the indices of first parts,
        and all completions that continue them are sampled."""
        seeds = [seed + numbers.start for seed in self._seeds(prompts)]
        params = self._params.with_first_parts(len(numbers))
        return self.completion_sampler.sample(prompts, params, seeds, first=numbers.start)

    def _seeds(self, prompts: Sequence[EncodedPrompt]) -> list[int]:
        return [sampling_seed(self.recipe.train.seed, prompt.index) for prompt in prompts]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledGroups:
    """All groups that a step sampled, and which of them are learnt from."""

    scored: tuple[ScoredGroup, ...]  # of this rank
    chosen: frozenset[int] | None  # indices of prompts, of all ranks; None: all
    tries: int | None = None  # further rollouts that were made; None if the recipe wants none

    @property
    def learnt(self) -> list[ScoredGroup]:
        return [group for group in self.scored if self.chosen is None or group.group.prompt.index in self.chosen]

    def metrics(self) -> dict[str, float]:
        return (
            {} if self.tries is None else {"group/resample_tries": self.tries, "group/chosen": len(self.chosen or ())}
        )


def has_variance(group: ScoredGroup, depends_on: str, weights: Sequence[float]) -> bool:
    """Return whether two scorable completions differ in what the advantage depends on (Advantage.depends_on). `weights`
    are those of the rewards; one of weight 0 is only measured."""
    seen = set()
    for completion in group.completions:
        if completion.total is not None:
            values = {
                "totals": completion.total,
                "right": bool(completion.is_correct),
                "rewards": tuple(
                    value.value for value, weight in zip(completion.rewards.values(), weights, strict=True) if weight
                ),
            }
            seen.add(tuple(values.values()) if depends_on == "all" else values[depends_on])
    return len(seen) > 1


def teaches(group: ScoredGroup, algorithm: Algorithm, weights: Sequence[float]) -> bool:
    """Return whether a group has an advantage that is not 0; `weights` are those of the rewards. With pass_k every draw
    of k passes, and all advantages are 0, if fewer than k completions are wrong. If truncated completions are
    masked, some other one must be there to learn from."""
    advantage = advantage_of(algorithm.advantage)
    if not has_variance(group, advantage.depends_on, weights):
        return False
    if algorithm.overlong == "mask" and all(
        each.completion.is_truncated for each in group.completions if each.total is not None
    ):
        return False
    is_wrong = [not each.is_correct for each in group.completions if each.total is not None]
    return not advantage.needs_pass_k or sum(is_wrong) >= min(algorithm.pass_k or 1, len(is_wrong))


def sample_and_score(session: Session, trainer: Trainer, rollouts: Rollouts, step: Step) -> SampledGroups:
    """Sample completions of the step's prompts and score them; sample further prompts if the recipe wants groups whose
    rewards differ. All ranks call it."""
    recipe, ranks = rollouts.recipe, session.ranks
    with step.phase("rollout"):
        rollouts.add_ready(
            ranks.run_on_all(partial(answered_groups, recipe, trainer.family, step.prompts, step.number))
        )
        groups = rollouts.groups_for(step.prompts)
        rollouts.keep_for_resume(session.run, step.number, groups)
        rollouts.begin_lookahead(step.upcoming)
    with step.phase("reward"):
        scored = rollouts.score(groups)
    return resample_until_full(rollouts, step, scored, recipe)


def resample_until_full(
    rollouts: Rollouts, step: Step, scored: Sequence[ScoredGroup], recipe: GrpoRecipe
) -> SampledGroups:
    """Add the groups of at most `rollout.resample_tries` further rollouts, each of as many rows, to the step's. The
    first `optim.prompts_per_step` groups whose rewards differ, in the order of their indices, are learnt from; all
    groups if there is none."""
    tries, wanted = recipe.rollout.resample_tries, recipe.optim.prompts_per_step
    if not tries:
        return SampledGroups(scored=tuple(scored), chosen=None)
    every, made = list(scored), 0
    good = _good_indices(rollouts.ranks, every, recipe)
    while len(good) < wanted and made < tries:
        with step.phase("data", ()):
            batch = step.further(indices_of_try(step.number, made, tries, wanted))
        row_ids = [prompt.row.id for prompt in batch.prompts]
        with step.phase("rollout", row_ids):
            groups = rollouts.groups_for(batch.prompts)
        with step.phase("reward", row_ids):
            every += rollouts.score(groups)
        good = _good_indices(rollouts.ranks, every, recipe)
        made += 1
    return SampledGroups(scored=tuple(every), chosen=frozenset(good[:wanted]) or None, tries=made)


def _good_indices(ranks: Ranks, scored: Sequence[ScoredGroup], recipe: GrpoRecipe) -> list[int]:
    weights = [reward.weight for reward in recipe.rewards]
    own = [group.group.prompt.index for group in scored if teaches(group, recipe.algorithm, weights)]
    return sorted(index for indices in ranks.all_gather(own) for index in indices)
