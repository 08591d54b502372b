"""Dynamic sampling: further rows are sampled until enough groups of the step have rewards that differ (DAPO 2025)."""

from collections.abc import Sequence
from dataclasses import dataclass

from tiercel.algorithms import advantage_of
from tiercel.config.schema import GrpoRecipe
from tiercel.data.order import indices_of_try
from tiercel.distributed.ranks import Ranks
from tiercel.training.rollouts import Rollouts
from tiercel.training.step import Step
from tiercel.training.step_rows import StepRows
from tiercel.types import EncodedPrompt, ScoredGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Filled:
    """All groups of a step that were sampled, and which of them are learnt from."""

    scored: tuple[ScoredGroup, ...]  # of this rank
    chosen: frozenset[int] | None  # indices of prompts, of all ranks; None: all
    tries: int | None = None  # further rollouts that were made; None where the recipe wants none

    @property
    def learnt(self) -> list[ScoredGroup]:
        return [group for group in self.scored if self.chosen is None or group.group.prompt.index in self.chosen]

    def metrics(self) -> dict[str, float]:
        return (
            {} if self.tries is None else {"group/resample_tries": self.tries, "group/chosen": len(self.chosen or ())}
        )


def has_variance(group: ScoredGroup, looks_at: str) -> bool:
    """Tell whether two scorable completions differ in what the advantage looks at (Advantage.looks_at)."""
    seen = set()
    for completion in group.completions:
        if completion.total is not None:
            values = {
                "totals": completion.total,
                "right": bool(completion.is_correct),
                "rewards": tuple(value.value for value in completion.rewards.values()),
            }
            seen.add(tuple(values.values()) if looks_at == "all" else values[looks_at])
    return len(seen) > 1


def filled_up(
    rows: StepRows[EncodedPrompt], rollouts: Rollouts, step: Step, scored: Sequence[ScoredGroup], recipe: GrpoRecipe
) -> Filled:
    """Add the groups of at most `rollout.resample_tries` further rollouts, each of as many rows, to the step's. The
    first `optim.prompts_per_step` groups whose rewards differ, in the order of their indices, are learnt from; all
    where there is none."""
    tries, wanted = recipe.rollout.resample_tries, recipe.optim.prompts_per_step
    if not tries:
        return Filled(scored=tuple(scored), chosen=None)
    every, made = list(scored), 0
    good = _good_indices(rollouts.ranks, every, recipe)
    while len(good) < wanted and made < tries:
        with step.phase("data", ()):
            batch = rows.further(step.number, indices_of_try(step.number, made, tries, wanted))
        row_ids = [prompt.row.id for prompt in batch.prompts]
        with step.phase("rollout", row_ids):
            groups = rollouts.of(batch.prompts)
        with step.phase("reward", row_ids):
            every += rollouts.scored(groups)
        good = _good_indices(rollouts.ranks, every, recipe)
        made += 1
    return Filled(scored=tuple(every), chosen=frozenset(good[:wanted]) or None, tries=made)


def _good_indices(ranks: Ranks, scored: Sequence[ScoredGroup], recipe: GrpoRecipe) -> list[int]:
    looks_at = advantage_of(recipe.algorithm.advantage).looks_at
    own = [group.group.prompt.index for group in scored if has_variance(group, looks_at)]
    return sorted(index for indices in ranks.gather(own) for index in indices)
