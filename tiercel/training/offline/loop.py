"""Learning from the rows' own answers (SFT, DPO, KTO): a run, and one step of it, top to bottom."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from tiercel.config.schema import OfflineRecipe
from tiercel.data.encoding import ExampleEncoder
from tiercel.data.order import RowOrder
from tiercel.models.layers.experts import METRICS
from tiercel.packing.examples import all_items
from tiercel.runs.directory import RunDirectory
from tiercel.training.finished_step import FinishedStep
from tiercel.training.metrics import memory_metrics, utilisation_metrics
from tiercel.training.nonfinite_batches import serialize_update_inputs
from tiercel.training.offline.example_loss import example_update
from tiercel.training.offline.heldout_loss import heldout_loss
from tiercel.training.offline.objectives import Objective, objective_of
from tiercel.training.offline.precomputed import ReferenceCache, load_or_compute_reference
from tiercel.training.optimizer_step import NO_UPDATE, sharing_metrics
from tiercel.training.rank_balancing import grouped_by_rank
from tiercel.training.session import Session, open_session
from tiercel.training.step import Step
from tiercel.training.step_batches import StepBatches
from tiercel.training.trainer import Trainer


def train(recipe: OfflineRecipe, run: RunDirectory) -> None:
    """Run the recipe from the newest valid checkpoint, or from the start, to its end."""
    for _ in steps(recipe, run):
        pass


def steps(recipe: OfflineRecipe, run: RunDirectory) -> Iterator[FinishedStep]:
    """Do the same, and yield each step once it is recorded, and saved if that is due."""
    with open_session(recipe, run) as session:
        if session.is_over:
            return
        trainer = session.open_trainer()
        objective = objective_of(recipe)
        objective.state.update(session.restored_state)
        loop = OfflineLoop(
            recipe=recipe,
            session=session,
            trainer=trainer,
            objective=objective,
            reference=load_or_compute_reference(recipe, session, trainer),
            order=session.table.order(recipe.train.seed, recipe.data),
        )
        with session.forgiving_repeated_failure():
            if session.is_unscored and (row := loop.evaluated(session.start)):
                session.record_first_evaluation(row)
                session.progress.step({"step": session.start, **row})
        encode = ExampleEncoder(recipe=recipe, family=trainer.family, rows=session.table.rows, order=loop.order)
        with StepBatches(session, encode) as rows, session.saved_on_error(trainer):
            for step in rows.steps():
                with session.profiled(step):
                    one_step(loop, step)
                session.save_if_due(step, trainer)
                with session.progress.handler.without_this_thread():
                    yield session.finished(step)
                session.end_if_asked(step, trainer)


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineLoop:
    """What all steps share."""

    recipe: OfflineRecipe
    session: Session
    trainer: Trainer
    objective: Objective
    reference: ReferenceCache
    order: RowOrder

    def evaluated(self, step: int) -> dict[str, float]:
        """Compute the loss of the held-out rows after `step` updates, and record how pairs were judged; empty if there
        are no such rows."""
        table = self.session.rows.heldout
        if table is None:
            return {}
        session, trainer = self.session, self.trainer
        session.ranks.heartbeat.begin("evaluation", step)
        known, no_stop = self.reference.heldout, partial(session.require_no_stop, step)
        measure = partial(heldout_loss, trainer, self.objective, self.recipe, table, known, no_stop)
        if self.recipe.purpose != "pairs":
            return measure()
        with session.run.recording("evaluations", step, trainer.family) as record:
            return measure(keep=lambda pairs: record(pairs, [[None, None]] * len(pairs)))


def one_step(loop: OfflineLoop, step: Step) -> None:
    """Learn from the step's examples, evaluate if that is due, and record the step."""
    session, trainer, objective = loop.session, loop.trainer, loop.objective
    with step.phase("learn"):
        rate = session.prepare_update(trainer, step)
        groups = grouped_by_rank(trainer, step.prompts)
        inputs = objective.prepare(trainer, groups, loop.reference.of(groups, loop.order, session.ranks))
        attempted, kept = (
            partial(example_update, trainer, objective, inputs),
            partial(serialize_update_inputs, inputs, objective.state),
        )
        update = session.guard.attempt(trainer, attempted, kept) or NO_UPDATE
        trainer.vision.end_step()
    learnt = {"loss": update.loss, "grad_norm": update.grad_norm}
    step.metrics = {
        **(learnt | objective.metrics(update.loss_sums, inputs.examples) if update is not NO_UPDATE else {}),
        "lr": rate,
        **update.token_means("entropy/"),
        "tokens/prompt": update.pass_sums["packed/repeated"] - update.tokens,
        **sharing_metrics(update.pass_sums),
        "tokens/completion": update.tokens,
        **update.token_means(METRICS),
        "loss_scale/skipped": int(update.overflowed),
        "time/step": step.times()["time/step"],
        **memory_metrics(session.ranks, trainer.policy.device),
        **utilisation_metrics(trainer, all_items(inputs.groups), step.seconds("learn")),
    }
    session.stage_for_saving(step, state=objective.state)
    if session.is_evaluated_after(step):
        step.metrics |= loop.evaluated(step.updates_done)
    session.record_step(step)
