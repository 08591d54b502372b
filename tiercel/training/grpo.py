"""Group-relative policy optimisation: the story of a run, top to bottom."""

import time
from collections.abc import Mapping, Sequence

import torch

from tiercel.algorithms import ADVANTAGES, Totals
from tiercel.config.schema import GrpoRecipe
from tiercel.data.loader import StepLoader
from tiercel.learner.batch import (
    AdvantageGroup,
    PolicyUnit,
    advantage_groups,
    policy_units,
    totals_of,
    without_zero_groups,
)
from tiercel.rewards.metrics import require_few_failures, reward_statistics
from tiercel.rewards.scoring import Scorer
from tiercel.rollout.drawing import sampling_seed
from tiercel.rollout.local import LocalSampler
from tiercel.rollout.sampler import sampling_params
from tiercel.runs.directory import RunDirectory
from tiercel.runs.progress import Progress
from tiercel.training import setup
from tiercel.training.encoding import prompt_encoder
from tiercel.training.evaluation import evaluate
from tiercel.training.optimizer import learning_rate, set_learning_rate
from tiercel.training.update import Engine, Update, policy_update, unit_logprobs
from tiercel.types import ScoredGroup


def train(recipe: GrpoRecipe, run: RunDirectory) -> None:
    """Run the recipe from the newest valid checkpoint, or from the start, to its end."""
    with setup.open_session(recipe, "grpo", run) as session:
        start, steps = session.start, session.steps
        if start >= steps:
            session.progress.say("nothing left to do")
            return
        engine = setup.build_engine(recipe, session.found, recipe.rollout.temperature, session.progress.say)
        family = engine.policy.family
        sampler = LocalSampler(engine.policy, engine.vision)
        order = setup.step_order(recipe, session, engine)
        encode = prompt_encoder(family, recipe.data, recipe.data.train)
        workers, rejected = recipe.data.workers, set[str]()
        with (
            Scorer(recipe.rewards, recipe.reliability, family.coordinate_space) as scorer,
            StepLoader(session.table.rows, encode, order, start=start, stop=steps, workers=workers) as loader,
        ):
            if start == 0 and (row := evaluation_row(run, 0, sampler, engine, recipe, scorer, session.progress)):
                run.record({"step": 0, **row})
            clock = Clock()
            for batch in loader:  # step updates are done; this makes one more
                step = batch.step
                clock.lap("data")
                setup.check_rejected(batch, session.table, rejected, recipe, run)
                sampler.load_policy(step, None)
                seeds = [sampling_seed(recipe.train.seed, prompt.index) for prompt in batch.prompts]
                groups = sampler.sample(batch.prompts, sampling_params(recipe.rollout), seeds)
                clock.lap("rollout")
                scored = scorer.score(groups)
                require_few_failures(scored, recipe.reliability.max_failed_reward_fraction)
                clock.lap("reward")
                learnable = advantage_groups(scored, ADVANTAGES[recipe.algorithm.advantage])
                run.record_groups("rollouts", step + 1, family, scored, shown_advantages(scored, learnable))
                rate = learning_rate(recipe.optim, step, steps)
                set_learning_rate(engine.optimizer, rate)
                setup.seed_step(recipe.train.seed, step)
                updates = learn(engine, learnable, recipe)
                engine.vision.end_step()
                clock.lap("learn")
                row = {
                    "step": step + 1,
                    "lr": rate,
                    **update_metrics(updates),
                    **reward_statistics(scored),
                    **completion_metrics(scored),
                    "policy_version": step,
                    "rows/rejected": len(batch.rejected),
                    "group/skipped": skipped_groups(learnable, recipe),
                    "memory/peak_bytes": setup.peak_memory(engine.policy.device),
                    **clock.metrics(),
                }
                if setup.is_due(step + 1, recipe.train.eval_every, steps):
                    row |= evaluation_row(run, step + 1, sampler, engine, recipe, scorer, session.progress)
                run.record(row)
                session.progress.step(row)
                setup.stop_if_asked(session.stop, run, recipe, engine, step + 1)
                if setup.is_due(step + 1, recipe.train.save_every, steps):
                    setup.save(run, recipe, engine, step + 1)
                clock = Clock()


def learn(engine: Engine, groups: Sequence[AdvantageGroup], recipe: GrpoRecipe) -> list[Update]:
    """One update per minibatch. Old logprobs are computed, before the first, only where there are several."""
    count = min(recipe.optim.minibatches, max(1, len(groups)))
    minibatches: list[tuple[Totals, list[PolicyUnit]]] = []
    for number in range(count):
        part = groups[len(groups) * number // count : len(groups) * (number + 1) // count]
        totals = engine.strategy.global_totals(totals_of(part))
        learnt = without_zero_groups(part) if skips_zero_groups(recipe) else part
        budget = recipe.learner.max_tokens_per_microbatch
        units = policy_units(learnt, totals, engine.learner.form, budget, engine.strategy.keeps_learner_whole)
        minibatches.append((totals, units))
    is_on_policy = count == 1
    old = [
        [[None] * len(unit.batches) if is_on_policy else unit_logprobs(engine, unit) for unit in units]
        for _, units in minibatches
    ]
    return [
        policy_update(engine, units, old_logprobs, recipe.algorithm, totals)
        for (totals, units), old_logprobs in zip(minibatches, old, strict=True)
        if totals.tokens
    ]


def skipped_groups(groups: Sequence[AdvantageGroup], recipe: GrpoRecipe) -> int:
    """Groups that the learner did not compute."""
    return len(groups) - len(without_zero_groups(groups)) if skips_zero_groups(recipe) else 0


def skips_zero_groups(recipe: GrpoRecipe) -> bool:
    """Whether groups without a nonzero advantage stay out of the learner: only where the loss has no other term."""
    return recipe.learner.skip_zero_advantage and recipe.algorithm.kl.coef == 0


def evaluation_row(
    run: RunDirectory,
    step: int,
    sampler: LocalSampler,
    engine: Engine,
    recipe: GrpoRecipe,
    scorer: Scorer,
    progress: Progress,
) -> dict[str, float]:
    """Evaluate, keep the completions, say the score."""
    started = time.perf_counter()
    sampler.load_policy(step, None)
    evaluation = evaluate(sampler, engine.policy.family, recipe, scorer)
    engine.vision.end_step()
    if evaluation is None:
        return {}
    no_advantages = [[None] for _ in evaluation.scored]
    run.record_groups("evaluations", step, engine.policy.family, evaluation.scored, no_advantages)
    progress.say(f"held out, step {step}: {evaluation.summary()}")
    return {**evaluation.metrics(), "eval/time": time.perf_counter() - started}


def shown_advantages(scored: Sequence[ScoredGroup], learnable: Sequence[AdvantageGroup]) -> list[list[float | None]]:
    """Advantage of every completion for rollouts/; None where it was masked or its group dropped."""
    by_index = {group.item.prompt.index: iter(group.advantages_G.tolist()) for group in learnable}
    return [
        [
            next(by_index[group.group.prompt.index])
            if completion.total is not None and group.group.prompt.index in by_index
            else None
            for completion in group.completions
        ]
        for group in scored
    ]


def update_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Means over the step's updates; token means are weighted by tokens."""
    in_loss = _summed([update.loss_sums for update in updates])
    in_pass = _summed([update.pass_sums for update in updates])
    passed = in_pass.pop("tokens", 0.0)
    return {
        "loss": setup.mean([update.loss for update in updates]),
        "grad_norm": setup.mean([update.grad_norm for update in updates]),
        "loss_scale/skipped": sum(update.was_skipped for update in updates),
        **setup.per_token(in_loss, sum(update.tokens for update in updates)),
        **setup.per_token(in_pass, passed),
    }


def _summed(sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = sorted({name for each in sums for name in each})
    return {name: sum(each.get(name, 0.0) for each in sums) for name in names}


def completion_metrics(scored: Sequence[ScoredGroup]) -> dict[str, float]:
    """Lengths and truncation of the step's completions."""
    completions = [c.completion for group in scored for c in group.completions]
    tokens = sum(len(c.token_ids_C) for c in completions)
    return {
        "completion/tokens_mean": tokens / max(1, len(completions)),
        "completion/truncated_fraction": sum(c.is_truncated for c in completions) / max(1, len(completions)),
        "tokens/prompt": sum(len(group.group.prompt.token_ids_P) for group in scored),
        "tokens/completion": tokens,
    }


class Clock:
    """Seconds of the phases of one step."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._laps: dict[str, float] = {"sync": 0.0}

    def lap(self, phase: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self._laps[phase] = now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        laps = {f"time/{phase}": seconds for phase, seconds in self._laps.items()}
        return {**laps, "time/step": time.perf_counter() - self._start}
