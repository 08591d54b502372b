"""Group-relative policy optimisation: a run, and one step of it, top to bottom."""

from functools import partial

from tiercel.config.schema import GrpoRecipe
from tiercel.packing.batch import advantage_groups
from tiercel.runs.directory import RunDirectory
from tiercel.training.evaluation import evaluate_policy
from tiercel.training.finite import keep_groups
from tiercel.training.grpo.advantages import step_advantages
from tiercel.training.grpo.engine_gap import warn_of_gap
from tiercel.training.grpo.minibatches import learnt_items
from tiercel.training.grpo.parity import check_parity
from tiercel.training.grpo.reference_passes import kl_penalties
from tiercel.training.grpo.rollouts import Rollouts, open_rollouts, resample_until_full
from tiercel.training.grpo.row_answers import answered_groups
from tiercel.training.grpo.token_records import token_records
from tiercel.training.grpo.updates import learn
from tiercel.training.metrics import memory_metrics, rollout_metrics, utilisation_metrics
from tiercel.training.schedule import prepare_update
from tiercel.training.session import Session, open_session
from tiercel.training.start_checks import require_installed
from tiercel.training.step import Step
from tiercel.training.step_rows import StepRows
from tiercel.training.strategy_choice import keep_tokens, kept_tokens
from tiercel.training.teaching import with_gaps
from tiercel.training.trainer import Trainer, build_trainer
from tiercel.types import EncodedPrompt


def train(recipe: GrpoRecipe, run: RunDirectory) -> None:
    """Run the recipe from the newest valid checkpoint, or from the start, to its end."""
    require_installed(recipe)
    with open_session(recipe, run) as session:
        if session.is_over:
            return
        trainer = build_trainer(recipe, session.found, session.say, session.ranks, kept_tokens(recipe, run))
        keep_tokens(recipe, run, trainer.max_tokens)
        with open_rollouts(recipe, session, trainer) as (rows, rollouts):
            rollouts.sync.load(session.start)
            if session.start == 0:
                session.open_with(evaluate_policy(session, trainer, rollouts, 0))
            for step in rows.steps(ahead=rollouts.steps_ahead):
                if step.number == session.start:
                    with step.untimed_phase("parity"):
                        check_parity(rollouts.sync, trainer, recipe, step, session.say)
                with session.profiled(step):
                    one_step(session, trainer, rows, rollouts, step)


def one_step(session: Session, trainer: Trainer, rows: StepRows[EncodedPrompt], rollouts: Rollouts, step: Step) -> None:
    """Sample, score, learn, publish the new policy to the engine, record; evaluate and save where that is due."""
    recipe, ranks, run = rollouts.recipe, session.ranks, session.run
    with step.phase("rollout"):
        rollouts.take(ranks.together(partial(answered_groups, recipe, trainer.family, step.prompts, step.updates)))
        groups = rollouts.of(step.prompts)
        rollouts.keep(run, step.number, groups)
        rollouts.begin(step.upcoming)
    with step.phase("reward"):
        scored = rollouts.scored(groups)
    filled = resample_until_full(rows, rollouts, step, scored, recipe)
    with step.phase("learn"):
        penalties = kl_penalties(trainer, filled.learnt)
        advantages = step_advantages(ranks, filled.scored, recipe, penalties=penalties.of_group, among=filled.chosen)
        learnable = trainer.with_teacher_terms(advantage_groups(filled.scored, advantages, penalties.old_logprobs))
        noted = with_gaps(trainer.family, filled.scored, advantages, learnable)
        everyone = run.record_groups("rollouts", step.updates, trainer.family, noted, advantages)
        rate = prepare_update(trainer, recipe, step.number, session.length.steps)
        keep = partial(keep_groups, rollouts=run.rollouts_file(step.updates))
        learnt = learn(trainer, learnable, recipe, partial(session.guard.attempt, trainer, keep=keep))
        warn_of_gap(recipe, step.number, *learnt.in_passes(), session.say)
        trainer.vision.end_step()
    notes = token_records(ranks, trainer.family, everyone, learnt.seen, recipe.rollout.record_tokens)
    run.record_tokens(step.updates, notes)
    with step.phase("rollout", ()):
        rollouts.finish()
    with step.phase("sync", ()):
        trainer.move_reference(recipe.algorithm.kl, step.updates)
        rollouts.sync.load(step.updates)
    step.row = {
        "lr": rate,
        **learnt.metrics(),
        **rollout_metrics(step.number, everyone, recipe),
        **ranks.sum(rollouts.sampler.metrics()),
        **penalties.metrics(ranks),
        **filled.metrics(),
        **learnt.skipped_of_all(ranks),
        **memory_metrics(ranks, trainer.policy.device),
        **utilisation_metrics(trainer, learnt_items(trainer, learnable, recipe), step.seconds("learn")),
        **step.times(),
    }
    if session.is_evaluated_after(step):
        step.row |= evaluate_policy(session, trainer, rollouts, step.updates)
    session.close_step(step, trainer, rollouts.pending())
