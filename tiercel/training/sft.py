"""Supervised fine-tuning: the story of a run, top to bottom."""

import time

from tiercel.config.schema import SftRecipe
from tiercel.data.loader import StepLoader
from tiercel.learner.batch import conversation_item, packed_bins
from tiercel.learner.layout import PackedTokens, pack
from tiercel.runs.directory import RunDirectory
from tiercel.training import setup
from tiercel.training.encoding import conversation_encoder
from tiercel.training.evaluation import heldout_loss
from tiercel.training.optimizer import learning_rate, set_learning_rate
from tiercel.training.update import sft_update
from tiercel.types import EncodedConversation


def train(recipe: SftRecipe, run: RunDirectory) -> None:
    """Run the recipe from the newest valid checkpoint, or from the start, to its end."""
    with setup.open_session(recipe, "sft", run) as session:
        start, steps = session.start, session.steps
        if start >= steps:
            session.progress.say("nothing left to do")
            return
        engine = setup.build_engine(recipe, session.found, 1.0, session.progress.say)
        if start == 0 and (row := heldout_loss(engine, recipe)):
            run.record({"step": 0, **row})
            session.progress.step({"step": 0, **row})
        order = setup.step_order(recipe, session, engine)
        encode = conversation_encoder(engine.policy.family, recipe.data, recipe.data.train)
        workers, rejected = recipe.data.workers, set[str]()
        with StepLoader(session.table.rows, encode, order, start=start, stop=steps, workers=workers) as loader:
            clock = time.perf_counter()
            for batch in loader:
                step = batch.step
                setup.check_rejected(batch, session.table, rejected, recipe, run)
                rate = learning_rate(recipe.optim, step, steps)
                set_learning_rate(engine.optimizer, rate)
                setup.seed_step(recipe.train.seed, step)
                budget = recipe.learner.max_tokens_per_microbatch
                packed, row_ids = microbatches(batch.prompts, engine.learner.form, budget)
                update = sft_update(engine, packed, row_ids)
                engine.vision.end_step()
                now = time.perf_counter()
                row = {
                    "step": step + 1,
                    "loss": update.loss,
                    "lr": rate,
                    "grad_norm": update.grad_norm,
                    "entropy/mean": update.pass_sums["entropy/mean"] / max(1, update.tokens),
                    "tokens/prompt": sum(len(p.token_ids_T) for p in packed) - update.tokens,
                    "tokens/completion": update.tokens,
                    "rows/rejected": len(batch.rejected),
                    "loss_scale/skipped": int(update.was_skipped),
                    "time/step": now - clock,
                    "memory/peak_bytes": setup.peak_memory(engine.policy.device),
                }
                if setup.is_due(step + 1, recipe.train.eval_every, steps):
                    row |= heldout_loss(engine, recipe)
                run.record(row)
                session.progress.step(row)
                clock = time.perf_counter()
                setup.stop_if_asked(session.stop, run, recipe, engine, step + 1)
                if setup.is_due(step + 1, recipe.train.save_every, steps):
                    setup.save(run, recipe, engine, step + 1)


def microbatches(
    conversations: tuple[EncodedConversation, ...], form: str, budget: int
) -> tuple[list[PackedTokens], list[tuple[str, ...]]]:
    """Packed conversations within the token budget, and the row ids of each."""
    items = [conversation_item(conversation) for conversation in conversations]
    bins = packed_bins(items, form, budget)
    packed = [pack([items[i] for i in bin_]) for bin_ in bins]
    return packed, [tuple(items[i].prompt.row.id for i in bin_) for bin_ in bins]
