"""Group-relative policy optimisation: a run, and one step of it, top to bottom."""

from collections.abc import Iterator

from tiercel.config.schema import GrpoRecipe
from tiercel.runs.directory import RunDirectory
from tiercel.training.evaluation import evaluate_policy
from tiercel.training.finished_step import FinishedStep
from tiercel.training.grpo.advantages import compute_advantages
from tiercel.training.grpo.minibatch_updates import update_policy
from tiercel.training.grpo.outcome import StepOutcome, record_rollouts, record_tokens, step_metrics
from tiercel.training.grpo.rollouts import Rollouts, open_rollouts, sample_and_score
from tiercel.training.session import Session, open_session
from tiercel.training.step import Step
from tiercel.training.trainer import Trainer


def train(recipe: GrpoRecipe, run: RunDirectory) -> None:
    """Run the recipe from the newest valid checkpoint, or from the start, to its end."""
    for _ in steps(recipe, run):
        pass


def steps(recipe: GrpoRecipe, run: RunDirectory) -> Iterator[FinishedStep]:
    """Run the recipe as `train` does, and yield each step after its metrics are written, and its checkpoint if one is
    due."""
    with open_session(recipe, run) as session:
        if session.is_over:
            return
        trainer = session.open_trainer()
        with open_rollouts(recipe, session, trainer) as (batches, rollouts):
            rollouts.sync.update_weights(session.start)
            if session.is_unscored:
                with session.forgiving_repeated_failure():
                    session.record_first_evaluation(evaluate_policy(session, trainer, rollouts, session.start))
            with session.saved_on_error(trainer):
                for step in batches.steps(ahead=rollouts.steps_ahead):
                    if step.number == session.start:
                        rollouts.check_engine_logprobs(trainer, step)
                    with session.profiled(step):
                        one_step(session, trainer, rollouts, step)
                    session.save_if_due(step, trainer)
                    with session.progress.handler.without_this_thread():
                        yield session.finished(step)
                    session.end_if_asked(step, trainer)


def one_step(session: Session, trainer: Trainer, rollouts: Rollouts, step: Step) -> None:
    """Sample and score, compute advantages, learn, and send the new policy to the engine; evaluate if that is due."""
    recipe = rollouts.recipe
    sampled = sample_and_score(session, trainer, rollouts, step)
    with step.phase("advantages"):  # and the forward passes that a KL penalty in the reward and a teacher need
        advantages = compute_advantages(trainer, sampled, recipe)
    with step.phase("record"):
        recorded = record_rollouts(session, trainer, sampled, advantages, step, recipe)
    with step.phase("learn"):
        updates = update_policy(session, trainer, advantages.groups, recipe, step)
        trainer.strategy.zero_gradients()  # they would take memory of the next rollout
    outcome = StepOutcome(sampled=sampled, advantages=advantages, recorded=recorded, updates=updates)
    record_tokens(session, trainer, outcome, recipe.rollout.record_tokens, step)
    with step.phase("lookahead", (), timed_as="rollout"):  # of the next step, sampled while this one was learnt
        rollouts.wait_for_lookahead()
    with step.phase("sync", ()):
        trainer.sync_reference(step.updates_done)
        rollouts.sync.update_weights(step.updates_done)
    step.metrics |= step_metrics(trainer, rollouts, outcome, step)
    session.stage_for_saving(step, rollouts.pending())
    if session.is_evaluated_after(step):
        step.metrics |= evaluate_policy(session, trainer, rollouts, step.updates_done)
    session.record_step(step)
