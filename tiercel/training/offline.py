"""Learning from the rows' own answers (SFT, DPO, KTO, reward models): a run, and one step of it, top to bottom."""

from functools import partial

from tiercel.config.schema import OfflineRecipe
from tiercel.data.encoding import example_encoder
from tiercel.learner.examples import all_items
from tiercel.models.experts import METRICS
from tiercel.runs.directory import RunDirectory
from tiercel.training.budget import keep_tokens, kept_tokens
from tiercel.training.build import build_trainer
from tiercel.training.evaluation import evaluate_examples
from tiercel.training.metrics import memory_metrics, utilisation_metrics
from tiercel.training.minibatches import shared_out
from tiercel.training.objectives import Objective, objective_of
from tiercel.training.packages import require_installed
from tiercel.training.schedule import prepare_update
from tiercel.training.session import Session, open_session
from tiercel.training.step import Step
from tiercel.training.step_rows import StepRows
from tiercel.training.trainer import Trainer
from tiercel.training.update import NO_UPDATE, example_update


def train(recipe: OfflineRecipe, run: RunDirectory) -> None:
    """Run the recipe from the newest valid checkpoint, or from the start, to its end."""
    require_installed(recipe)
    with open_session(recipe, run) as session:
        if session.is_over:
            return
        trainer = build_trainer(recipe, session.found, session.say, session.ranks, kept_tokens(recipe, run))
        keep_tokens(recipe, run, trainer.max_tokens)
        objective = objective_of(recipe)
        objective.state.update(session.kept_state)
        if session.start == 0 and (row := evaluate_examples(session, trainer, objective, 0)):
            session.open_with(row)
            session.progress.step({"step": 0, **row})
        order = session.table.order(recipe.train.seed, recipe.data)
        with StepRows(session, example_encoder(recipe, trainer.family, session.table.rows, order)) as rows:
            for step in rows.steps():
                with session.profiled(step):
                    one_step(recipe, session, trainer, objective, step)


def one_step(recipe: OfflineRecipe, session: Session, trainer: Trainer, objective: Objective, step: Step) -> None:
    """Learn from the step's examples, record; evaluate and save where that is due."""
    with step.phase("learn"):
        rate = prepare_update(trainer, recipe, step.number, session.length.steps)
        made = shared_out(trainer, step.prompts, recipe)
        plan = objective.plan(trainer, made)
        update = session.guard.attempt(trainer, partial(example_update, trainer, objective, plan)) or NO_UPDATE
        trainer.vision.end_step()
    step.row = {
        "loss": update.loss,
        "lr": rate,
        "grad_norm": update.grad_norm,
        **(objective.metrics(update.loss_sums, plan.examples) if update is not NO_UPDATE else {}),
        **update.token_means("entropy/"),
        "tokens/prompt": update.pass_sums["tokens/packed"] - update.tokens,
        "tokens/completion": update.tokens,
        **update.token_means(METRICS),
        "loss_scale/skipped": int(update.was_skipped),
        "time/step": step.times()["time/step"],
        **memory_metrics(session.ranks, trainer.policy.device),
        **utilisation_metrics(trainer, all_items(plan.made), step.seconds("learn")),
    }
    if session.is_evaluated_after(step):
        step.row |= evaluate_examples(session, trainer, objective, step.updates)
    session.close_step(step, trainer, state=objective.state)
