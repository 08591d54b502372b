"""Group-relative policy optimisation: the story of a run, top to bottom."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from tiercel.algorithms import ADVANTAGES, Totals
from tiercel.algorithms.correction import drift_metrics
from tiercel.config.schema import GrpoRecipe
from tiercel.data.loader import StepBatch, StepLoader
from tiercel.distributed.ranks import Ranks, largest_by_name
from tiercel.learner.batch import (
    AdvantageGroup,
    PolicyUnit,
    advantage_groups,
    empty_unit,
    policy_units,
    totals_of,
    without_zero_groups,
)
from tiercel.learner.forms import packed_length
from tiercel.models.reference import move_reference
from tiercel.rewards.metrics import FailureStats, count_failures, reward_statistics
from tiercel.rewards.scoring import Scorer
from tiercel.rollout.sampler import Sampler
from tiercel.runs.directory import RunDirectory
from tiercel.runs.waiting import entered, waiting
from tiercel.training import setup
from tiercel.training.advantages import step_advantages
from tiercel.training.before import before_updates
from tiercel.training.clock import Clock
from tiercel.data.encoding import prompt_encoder
from tiercel.training.engine_gap import gap_metrics, warn_of_gap
from tiercel.training.evaluation import heldout_groups, judge
from tiercel.training.finite import require_finite_advantages
from tiercel.training.guard import FiniteGuard
from tiercel.training.packages import require_installed
from tiercel.training.parity import check_parity
from tiercel.training.penalty import kl_penalties, penalises_reward
from tiercel.training.replay import keep_groups
from tiercel.training.resampling import filled_up
from tiercel.training.rollouts import Rollouts
from tiercel.training.sampling import open_sampler
from tiercel.training.schedule import learning_rate
from tiercel.training.sharing import balanced, minibatch_shares, padding_item, passes_to_add
from tiercel.training.spreading import cut_for_all
from tiercel.training.update import Engine, Update, policy_update
from tiercel.types import EncodedPrompt, Group, ScoredGroup


def train(recipe: GrpoRecipe, run: RunDirectory) -> None:
    """Run the recipe from the newest valid checkpoint, or from the start, to its end."""
    require_installed(recipe)
    with setup.open_session(recipe, "grpo", run) as session:
        start, steps = session.start, session.steps
        if start >= steps:
            session.progress.say("nothing left to do")
            return
        ranks, say = session.ranks, session.progress.say
        engine = setup.build_engine(recipe, session.found, recipe.rollout.temperature, say, ranks)
        family = engine.policy.family
        order = setup.step_order(recipe, session)
        encode = prompt_encoder(family, recipe.data)
        workers, rejected = recipe.data.workers, set[setup.Place]()
        rewards = Scorer(recipe.rewards, recipe.reliability, family.coordinate_space)
        sampling = open_sampler(recipe, engine, run, session.read.every, say)
        with (
            entered(rewards, say, "starting the rewards") as scorer,
            StepLoader(session.table.rows, encode, order, start=start, stop=steps, workers=workers) as loader,
            entered(sampling, say, f"starting the {recipe.rollout.engine} engine") as (sampler, sync),
        ):
            rollouts = Rollouts(sampler, recipe, ranks, setup.pending_of(session.found))
            guard = FiniteGuard(run, recipe, engine, say)
            sync.load(start)
            if start == 0 and (row := evaluation_row(session, 0, sampler, engine, recipe, scorer)):
                setup.is_best(run, recipe, 0, row)  # names a metric that no evaluation will have
                session.record({"step": 0, **row})
            clock = Clock(ranks.pulse)
            clock.begin("data", start)
            for batch, upcoming in rollouts.with_next(setup.steps_of(loader, ranks)):
                step = batch.step  # so many updates are done; this makes one more
                setup.check_rejected(batch, session.table, rejected, recipe, run)
                rows = [prompt.row.id for prompt in batch.prompts]
                if step == start:
                    clock.begin("parity", step, rows)
                    check_parity(sync, sampler, engine, recipe, batch.prompts, step, say)
                    clock = Clock(ranks.pulse)
                clock.begin("rollout", step, rows)
                groups = rollouts.of(batch.prompts)
                rollouts.begin(upcoming)
                clock.begin("reward", step, rows)
                scored = score(ranks, scorer, groups, recipe)
                more = partial(sampled_and_scored, session, scorer, rollouts, recipe, rejected, clock)
                filled = filled_up(ranks, step, scored, recipe, session.table.rows, order.rows, encode, more)
                clock.begin("learn", step, rows)
                penalties = kl_penalties(engine, filled.learnt, recipe)
                advantages = step_advantages(
                    ranks, filled.scored, recipe, penalties=penalties.of_group, among=filled.chosen
                )
                learnable = advantage_groups(filled.scored, advantages, penalties.old_logprobs)
                learnable = require_finite_advantages(ranks, learnable)
                everyone = run.record_groups("rollouts", step + 1, family, filled.scored, advantages)
                rate = learning_rate(recipe.optim, step, steps)
                engine.strategy.set_learning_rate(rate)
                setup.seed_step(recipe.train.seed, step, ranks.rank)
                keep = partial(keep_groups, rollouts=run.rollouts_file(step + 1))
                updates = learn(engine, learnable, recipe, partial(guard.attempt, keep=keep))
                warn_of_gap(recipe, step, *in_passes(updates), say)
                engine.vision.end_step()
                clock.begin("rollout", step)
                rollouts.finish()
                clock.begin("sync", step)
                move_reference(engine.policy, recipe.algorithm.kl, step + 1)
                sync.load(step + 1)
                row = {
                    "step": step + 1,
                    "lr": rate,
                    **update_metrics(updates),
                    **reward_statistics(everyone, ADVANTAGES[recipe.algorithm.advantage].least_group),
                    **completion_metrics(everyone),
                    **version_metrics(step, everyone),
                    **ranks.sum(sampler.metrics()),
                    **penalties.metrics(ranks),
                    **filled.metrics(),
                    "update/left_out": guard.left_out,
                    "rows/rejected": len(batch.rejected),
                    "group/skipped": int(ranks.sum({"": skipped_groups(learnable, recipe)})[""]),
                    "memory/peak_bytes": ranks.largest(setup.peak_memory(engine.policy.device)),
                    **clock.metrics(),
                }
                is_to_save = setup.is_due(step + 1, recipe.train.save_every, steps)
                if setup.is_due(step + 1, recipe.train.eval_every, steps):
                    row |= evaluation_row(session, step + 1, sampler, engine, recipe, scorer)
                    is_to_save |= setup.is_best(run, recipe, step + 1, row)
                session.record(row)
                session.diagnose(row)
                session.progress.step(row)
                is_asked = ranks.any(session.stop.is_set)
                if is_to_save or is_asked:
                    setup.save(run, recipe, engine, step + 1, row, session.rows, rollouts.pending())
                setup.end_if(is_asked, step + 1)
                clock = Clock(ranks.pulse)
                clock.begin("data", step + 1)


def learn(
    engine: Engine,
    groups: Sequence[AdvantageGroup],
    recipe: GrpoRecipe,
    attempt: Callable[[Callable[[], Update]], Update | None] = lambda update: update(),
) -> list[Update]:
    """An update for every minibatch of every epoch, but for those that `attempt` leaves out."""
    shares = minibatch_shares(engine.ranks, groups, recipe.optim.minibatches, lambda group: group.item.prompt.index)
    minibatches = [minibatch_units(engine, share, recipe) for share in shares]
    known = [before_updates(engine, units, recipe) for _, units in minibatches]
    updates = [
        attempt(partial(policy_update, engine, units, before, recipe, totals))
        for _ in range(recipe.optim.rollout_epochs)
        for (totals, units), before in zip(minibatches, known, strict=True)
        if totals.tokens
    ]
    return [update for update in updates if update is not None]


def minibatch_units(
    engine: Engine, groups: Sequence[AdvantageGroup], recipe: GrpoRecipe
) -> tuple[Totals, list[PolicyUnit]]:
    """The minibatch's totals over all ranks, and what this rank computes of it."""
    ranks, form, strategy = engine.ranks, engine.learner.form, engine.strategy
    totals = sum(ranks.gather(totals_of(groups)), Totals(tokens=0, completions=0, groups=0))
    learnt = without_zero_groups(groups) if skips_zero_groups(recipe) else groups
    learnt = balanced(
        ranks,
        cut_for_all(ranks, learnt),
        lambda group: packed_length(group.item, form),
        lambda group: group.item.prompt,
        engine.vision,
    )
    budget = recipe.learner.max_tokens_per_microbatch
    units = ranks.together(lambda: policy_units(learnt, totals, form, budget, strategy.passes_are_private))
    missing = passes_to_add(ranks, len(units), passes_are_private=strategy.passes_are_private)
    return totals, units + [empty_unit(padding_item(engine.policy.family), totals)] * missing


def skipped_groups(groups: Sequence[AdvantageGroup], recipe: GrpoRecipe) -> int:
    """Groups that the learner did not compute."""
    return len(groups) - len(without_zero_groups(groups)) if skips_zero_groups(recipe) else 0


def skips_zero_groups(recipe: GrpoRecipe) -> bool:
    """Whether groups without a nonzero advantage stay out of the learner: only where the loss has no other term."""
    algorithm = recipe.algorithm
    has_other_term = (algorithm.kl.coef > 0 and not penalises_reward(recipe)) or algorithm.entropy_coef > 0
    return recipe.learner.skip_zero_advantage and not has_other_term


def score(ranks: Ranks, scorer: Scorer, groups: Sequence[Group], recipe: GrpoRecipe) -> tuple[ScoredGroup, ...]:
    """This rank's groups with their rewards. Raises TrainingError where too many of all ranks' failed."""
    scored = ranks.together(partial(scorer.score, groups))
    require_few_failures(ranks, scored, recipe)
    return scored


def sampled_and_scored(
    session: setup.Session,
    scorer: Scorer,
    rollouts: Rollouts,
    recipe: GrpoRecipe,
    rejected: set[setup.Place],
    clock: Clock,
    batch: StepBatch[EncodedPrompt],
) -> tuple[ScoredGroup, ...]:
    """A further rollout of the step."""
    rows = [prompt.row.id for prompt in batch.prompts]
    batch = setup.with_all_rejected(batch, session.ranks)
    setup.check_rejected(batch, session.table, rejected, recipe, session.run)
    clock.begin("rollout", batch.step, rows)
    groups = rollouts.of(batch.prompts)
    clock.begin("reward", batch.step, rows)
    return score(session.ranks, scorer, groups, recipe)


def require_few_failures(ranks: Ranks, scored: Sequence[ScoredGroup], recipe: GrpoRecipe) -> None:
    """Raises TrainingError, on all ranks, where too many completions of all ranks have a failed reward."""
    failures = sum(ranks.gather(count_failures(scored)), FailureStats(completions=0, failed=0, first_failure=None))
    ranks.together(lambda: failures.require_at_most(recipe.reliability.max_failed_reward_fraction))


def evaluation_row(
    session: setup.Session, step: int, sampler: Sampler, engine: Engine, recipe: GrpoRecipe, scorer: Scorer
) -> dict[str, float]:
    """Evaluate, keep the completions, say the score."""
    table = session.read.heldout
    if table is None:
        return {}
    started = time.perf_counter()
    engine.ranks.pulse.begin("evaluation", step)
    with waiting(session.progress.say, "scoring the held-out rows"), sampler.awake():
        scored, rejected = heldout_groups(sampler, engine.policy.family, recipe, scorer, engine.ranks, table)
    engine.vision.end_step()
    no_advantages = [[None] for _ in scored]
    everyone = session.run.record_groups("evaluations", step, engine.policy.family, scored, no_advantages)
    evaluation = judge(everyone, rejected)
    session.progress.say(f"held out, step {step}: {evaluation.summary()}")
    return {**evaluation.metrics(), "eval/time": time.perf_counter() - started}


def update_metrics(updates: Sequence[Update]) -> dict[str, float]:
    """Means over the step's updates; token means are weighted by tokens."""
    in_loss = _summed([update.loss_sums for update in updates])
    in_pass, largest = in_passes(updates)
    passed = in_pass.pop("tokens", 0.0)
    apart = {name: in_pass.pop(name) for name in list(in_pass) if name.startswith(("drift/", "gap/"))}
    return {
        "loss": setup.mean([update.loss for update in updates]),
        "grad_norm": setup.mean([update.grad_norm for update in updates]),
        "loss_scale/skipped": sum(update.was_skipped for update in updates),
        **setup.per_token(in_loss, sum(update.tokens for update in updates)),
        **setup.per_token(in_pass, passed),
        **gap_metrics(apart),
        **drift_metrics(apart),
        **largest,
    }


def in_passes(updates: Sequence[Update]) -> tuple[dict[str, float], dict[str, float]]:
    """Sums, and largest values, over the tokens that went through the learner."""
    return _summed([update.pass_sums for update in updates]), largest_by_name([each.pass_largest for each in updates])


def version_metrics(step: int, scored: Sequence[ScoredGroup]) -> dict[str, int]:
    """The oldest policy that the step learnt from, and how many versions that is behind."""
    version = min((group.group.policy_version for group in scored), default=step)
    return {"policy_version": version, "sampler/staleness": step - version}


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
