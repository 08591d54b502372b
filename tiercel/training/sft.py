"""Supervised fine-tuning: a run, and one step of it, top to bottom."""

from functools import partial

from tiercel.config.schema import SftRecipe
from tiercel.data.encoding import conversation_encoder
from tiercel.learner.batch import conversation_item
from tiercel.models.experts import METRICS
from tiercel.runs.directory import RunDirectory
from tiercel.training.budget import keep_tokens, kept_tokens
from tiercel.training.build import build_trainer
from tiercel.training.evaluation import evaluate_loss
from tiercel.training.metrics import memory_metrics, utilisation_metrics
from tiercel.training.minibatches import conversation_passes
from tiercel.training.packages import require_installed
from tiercel.training.schedule import prepare_update
from tiercel.training.session import Session, open_session
from tiercel.training.step import Step
from tiercel.training.step_rows import StepRows
from tiercel.training.trainer import Trainer
from tiercel.training.update import NO_UPDATE, sft_update


def train(recipe: SftRecipe, run: RunDirectory) -> None:
    """Run the recipe from the newest valid checkpoint, or from the start, to its end."""
    require_installed(recipe)
    with open_session(recipe, "sft", run) as session:
        if session.is_over:
            return
        trainer = build_trainer(recipe, session.found, session.say, session.ranks, kept_tokens(recipe, run))
        keep_tokens(recipe, run, trainer.max_tokens)
        if session.start == 0 and (row := evaluate_loss(session, trainer, recipe, 0)):
            session.open_with(row)
            session.progress.step({"step": 0, **row})
        with StepRows(session, conversation_encoder(trainer.family, recipe.data)) as rows:
            for step in rows.steps():
                with session.profiled(step):
                    one_step(recipe, session, trainer, step)


def one_step(recipe: SftRecipe, session: Session, trainer: Trainer, step: Step) -> None:
    """Learn from the step's conversations, record; evaluate and save where that is due."""
    with step.phase("learn"):
        rate = prepare_update(trainer, recipe, step.number, session.length.steps)
        passes = conversation_passes(trainer, step.prompts)
        update = session.guard.attempt(trainer, partial(sft_update, trainer, passes)) or NO_UPDATE
        trainer.vision.end_step()
    step.row = {
        "loss": update.loss,
        "lr": rate,
        "grad_norm": update.grad_norm,
        **update.token_means("entropy/"),
        "tokens/prompt": update.pass_sums["tokens/packed"] - update.tokens,
        "tokens/completion": update.tokens,
        **update.token_means(METRICS),
        "loss_scale/skipped": int(update.was_skipped),
        "time/step": step.times()["time/step"],
        **memory_metrics(session.ranks, trainer.policy.device),
        **utilisation_metrics(trainer, [conversation_item(each) for each in step.prompts], step.seconds("learn")),
    }
    if session.is_evaluated_after(step):
        step.row |= evaluate_loss(session, trainer, recipe, step.updates)
    session.close_step(step, trainer)
