"""What a step of GRPO learns: an update for every minibatch of every epoch over the rollout."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tiercel.algorithms.correction import drift_metrics
from tiercel.config.schema import GrpoRecipe
from tiercel.distributed.ranks import Ranks, largest_by_name
from tiercel.packing.batch import AdvantageGroup
from tiercel.runs.records import groups_path
from tiercel.training.grpo.minibatches import learnt_groups, minibatches
from tiercel.training.grpo.policy_update import update_on_minibatch
from tiercel.training.grpo.precomputed_values import precompute_values
from tiercel.training.grpo.train_inference_mismatch import gap_metrics, warn_of_gap
from tiercel.training.nonfinite_batches import serialize_microbatches
from tiercel.training.nonfinite_guard import SerializeMicrobatches, copy_rollouts
from tiercel.training.optimizer_step import TokensSeen, Update, sharing_metrics
from tiercel.training.session import Session
from tiercel.training.step import Step
from tiercel.training.trainer import Trainer

Attempt = Callable[[Callable[[], Update], SerializeMicrobatches], Update | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepUpdates:
    """The updates of a step."""

    updates: Sequence[Update]
    skipped: int  # groups of this rank that the learner did not compute
    are_left_out: bool = False  # all of them, because their numbers are not finite

    @property
    def seen(self) -> list[TokensSeen]:
        """Return what the passes on this rank saw, in their order."""
        return [part for update in self.updates for part in update.seen]

    def in_passes(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the sums, and the largest values, over the tokens that went through the learner."""
        sums = _summed([update.pass_sums for update in self.updates])
        return sums, largest_by_name([update.pass_largest for update in self.updates])

    def metrics(self) -> dict[str, float]:
        """Return the means over the step's updates; token means are weighted by tokens."""
        in_loss = _summed([update.loss_sums for update in self.updates])
        in_pass, largest = self.in_passes()
        passed = in_pass.pop("tokens", 0.0)
        apart = {name: in_pass.pop(name) for name in list(in_pass) if name.startswith(("drift/", "gap/", "packed/"))}
        learnt = {
            "loss": _mean([update.loss for update in self.updates]),
            "grad_norm": _mean([update.grad_norm for update in self.updates]),
        }
        return {
            **({} if self.are_left_out else learnt),
            "loss_scale/skipped": sum(update.overflowed for update in self.updates),
            **_per_token(in_loss, sum(update.tokens for update in self.updates)),
            **_per_token(in_pass, passed),
            **gap_metrics(apart),
            **drift_metrics(apart),
            **sharing_metrics(apart),
            **largest,
        }

    def skipped_of_all(self, ranks: Ranks) -> dict[str, int]:
        """Return `group/skipped`, over all ranks."""
        return {"group/skipped": ranks.all_reduce_sum(self.skipped)}


def update_policy(
    session: Session, trainer: Trainer, groups: Sequence[AdvantageGroup], recipe: GrpoRecipe, step: Step
) -> StepUpdates:
    """Make the updates of a step under its learning rate, each checked to be finite, and warn of an engine that has
    gone wrong. Raises NonFiniteError, and TrainingError if that engine stops the run."""
    step.metrics["lr"] = session.prepare_update(trainer, step)
    keep = partial(copy_rollouts, rollouts=groups_path(session.run.path, "rollouts", step.updates_done))
    learnt = learn(trainer, groups, recipe, partial(session.guard.attempt, trainer, keep=keep))
    warn_of_gap(recipe, step.number, *learnt.in_passes())
    trainer.vision.end_step()
    return learnt


def learn(
    trainer: Trainer,
    groups: Sequence[AdvantageGroup],
    recipe: GrpoRecipe,
    attempt: Attempt = lambda update, kept: update(),
) -> StepUpdates:
    """Make the step's updates, except those that `attempt` skips. Raises NonFiniteError, and TrainingError if the
    engine has gone wrong."""
    every = [(each, precompute_values(trainer, each.units, recipe)) for each in minibatches(trainer, groups, recipe)]
    attempted = [
        attempt(
            partial(update_on_minibatch, trainer, minibatch, precomputed, recipe),
            partial(serialize_microbatches, minibatch.units, precomputed),
        )
        for _ in range(recipe.optim.rollout_epochs)
        for minibatch, precomputed in every
        if minibatch.totals.tokens
    ]
    updates = [update for update in attempted if update is not None]
    return StepUpdates(
        updates=updates,
        skipped=len(groups) - len(learnt_groups(trainer, groups, recipe)),
        are_left_out=bool(attempted) and not updates,
    )


def _summed(sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = sorted({name for each in sums for name in each})
    return {name: sum(each.get(name, 0.0) for each in sums) for name in names}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _per_token(sums: Mapping[str, float], tokens: float) -> dict[str, float]:
    """Return token sums as means."""
    return {name: value / max(1, tokens) for name, value in sums.items()}
