"""What a step of GRPO leaves behind: lines of rollouts/ and tokens/, and its row of metrics.jsonl."""

from collections.abc import Sequence
from dataclasses import dataclass

from tiercel.config.schema import GrpoRecipe
from tiercel.training.distillation.teacher_term import with_gaps
from tiercel.training.grpo.advantages import StepAdvantages
from tiercel.training.grpo.branches import branch_metrics, tell_of_unreached
from tiercel.training.grpo.minibatch_updates import StepUpdates
from tiercel.training.grpo.minibatches import learnt_items
from tiercel.training.grpo.rollouts import Rollouts, SampledGroups
from tiercel.training.grpo.token_records import token_records
from tiercel.training.metrics import memory_metrics, rollout_metrics, utilisation_metrics
from tiercel.training.session import Session
from tiercel.training.step import Step
from tiercel.training.trainer import Trainer
from tiercel.types import ScoredGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """What was sampled, what was learnt from, and what the updates were."""

    sampled: SampledGroups
    advantages: StepAdvantages
    recorded: Sequence[ScoredGroup]  # of all ranks, on the first
    updates: StepUpdates


def record_rollouts(
    session: Session,
    trainer: Trainer,
    sampled: SampledGroups,
    advantages: StepAdvantages,
    step: Step,
    recipe: GrpoRecipe,
) -> Sequence[ScoredGroup]:
    """Write the groups of all ranks to rollouts/, with their advantages; return them on the first rank."""
    groups = with_gaps(trainer.family, sampled.scored, advantages.values, advantages.groups)
    with session.run.recording("rollouts", step.updates_done, trainer.family) as record:
        recorded = record(groups, advantages.values)
    tell_of_unreached(recorded, recipe.rollout.branch_at, step.number)
    return recorded


def record_tokens(session: Session, trainer: Trainer, outcome: StepOutcome, most: int, step: Step) -> None:
    """Write what the passes saw at each token of the first `most` prompts to tokens/."""
    notes = token_records(session.ranks, trainer.family, outcome.recorded, outcome.updates.seen, most)
    session.run.record_tokens(step.updates_done, notes)


def step_metrics(trainer: Trainer, rollouts: Rollouts, outcome: StepOutcome, step: Step) -> dict[str, float]:
    """Return the step's row of metrics.jsonl, except its learning rate and what an evaluation adds."""
    recipe, ranks, updates = rollouts.recipe, trainer.ranks, outcome.updates
    items = learnt_items(trainer, outcome.advantages.groups, recipe)
    return {
        **updates.metrics(),
        **rollout_metrics(step.number, outcome.recorded, recipe),
        **branch_metrics(outcome.recorded),
        **ranks.all_reduce_sums(rollouts.sampler.metrics()),
        **outcome.advantages.penalties.metrics(ranks),
        **outcome.sampled.metrics(),
        **updates.skipped_of_all(ranks),
        **memory_metrics(ranks, trainer.policy.device),
        **utilisation_metrics(trainer, items, step.seconds("learn"), recipe.optim.rollout_epochs),
        **step.times(),
    }
