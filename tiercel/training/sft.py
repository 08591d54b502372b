"""Supervised fine-tuning: the story of a run, top to bottom."""

import time
from functools import partial

from tiercel.config.schema import SftRecipe
from tiercel.data.loader import StepLoader
from tiercel.runs.directory import RunDirectory
from tiercel.training import setup
from tiercel.data.encoding import conversation_encoder
from tiercel.training.evaluation import heldout_loss
from tiercel.training.guard import FiniteGuard
from tiercel.training.packages import require_installed
from tiercel.training.schedule import learning_rate
from tiercel.training.sharing import conversation_passes
from tiercel.training.update import NO_UPDATE, sft_update


def train(recipe: SftRecipe, run: RunDirectory) -> None:
    """Run the recipe from the newest valid checkpoint, or from the start, to its end."""
    require_installed(recipe)
    with setup.open_session(recipe, "sft", run) as session:
        start, steps = session.start, session.steps
        if start >= steps:
            session.progress.say("nothing left to do")
            return
        ranks = session.ranks
        engine = setup.build_engine(recipe, session.found, 1.0, session.progress.say, ranks)
        guard = FiniteGuard(run, recipe, engine, session.progress.say)
        ranks.pulse.begin("evaluation", start)
        if start == 0 and (row := heldout_loss(engine, recipe, session.read.heldout)):
            setup.is_best(run, recipe, 0, row)  # names a metric that no evaluation will have
            session.record({"step": 0, **row})
            session.progress.step({"step": 0, **row})
        order = setup.step_order(recipe, session)
        encode = conversation_encoder(engine.policy.family, recipe.data)
        workers, rejected = recipe.data.workers, set[setup.Place]()
        with StepLoader(session.table.rows, encode, order, start=start, stop=steps, workers=workers) as loader:
            clock = time.perf_counter()
            ranks.pulse.begin("data", start)
            for batch in setup.steps_of(loader, ranks):
                step = batch.step
                setup.check_rejected(batch, session.table, rejected, recipe, run)
                rate = learning_rate(recipe.optim, step, steps)
                engine.strategy.set_learning_rate(rate)
                setup.seed_step(recipe.train.seed, step, ranks.rank)
                ranks.pulse.begin("learn", step, [conversation.prompt.row.id for conversation in batch.prompts])
                passes = conversation_passes(engine, batch.prompts, recipe)
                update = guard.attempt(partial(sft_update, engine, passes)) or NO_UPDATE
                engine.vision.end_step()
                now = time.perf_counter()
                row = {
                    "step": step + 1,
                    "loss": update.loss,
                    "lr": rate,
                    "grad_norm": update.grad_norm,
                    "entropy/mean": update.pass_sums["entropy/mean"] / max(1, update.tokens),
                    "tokens/prompt": update.pass_sums["tokens/packed"] - update.tokens,
                    "tokens/completion": update.tokens,
                    "update/left_out": guard.left_out,
                    "rows/rejected": len(batch.rejected),
                    "loss_scale/skipped": int(update.was_skipped),
                    "time/step": now - clock,
                    "memory/peak_bytes": ranks.largest(setup.peak_memory(engine.policy.device)),
                }
                is_to_save = setup.is_due(step + 1, recipe.train.save_every, steps)
                if setup.is_due(step + 1, recipe.train.eval_every, steps):
                    ranks.pulse.begin("evaluation", step + 1)
                    row |= heldout_loss(engine, recipe, session.read.heldout)
                    is_to_save |= setup.is_best(run, recipe, step + 1, row)
                session.record(row)
                session.diagnose(row)
                session.progress.step(row)
                clock = time.perf_counter()
                is_asked = ranks.any(session.stop.is_set)
                if is_to_save or is_asked:
                    setup.save(run, recipe, engine, step + 1, row, session.rows)
                setup.end_if(is_asked, step + 1)
                ranks.pulse.begin("data", step + 1)
