"""Held-out rows: greedy completions, scored with training's own prompt and parser."""

import math
import statistics
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tiercel.config.schema import BaseRecipe, GrpoRecipe
from tiercel.data.encoding import prompt_encoder, require_readable
from tiercel.data.loader import Encoded, StepLoader, StepOrder
from tiercel.data.order import file_order
from tiercel.data.parallel_map import blocks_of
from tiercel.data.reading import read_heldout_rows
from tiercel.data.rejected_rows import require_few_bad
from tiercel.data.row_table import RowTable
from tiercel.distributed.ranks import Ranks
from tiercel.log import logger
from tiercel.message_text import counted
from tiercel.models.families.base import Family
from tiercel.models.vision_cache import VisionStore
from tiercel.rewards.runtime.metrics import NO_FAILURES, FailureStats
from tiercel.rewards.runtime.scorer import Scorer
from tiercel.rollout.sampler import greedy_params
from tiercel.runs.evaluation_groups import EvaluationSink
from tiercel.runs.progress import counting, waiting
from tiercel.runs.recording import gathered_groups, group_record
from tiercel.runs.records import GroupRecord
from tiercel.training.grpo.completion_sampling import CompletionSampler
from tiercel.training.grpo.rollouts import Rollouts
from tiercel.training.session import Session
from tiercel.training.step_batches import next_batch
from tiercel.training.trainer import Trainer
from tiercel.types import Group, RejectedRow, Row, ScoredGroup

ROWS_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Greedy score on held-out rows. A row whose judging reward failed counts as wrong; one that no reward judges does
    not count in the accuracy."""

    count: int
    judged: int  # rows that a reward calls right or wrong
    right: int
    missing: int  # rows without a reward
    failures: FailureStats
    rejected: int
    reward_means: dict[str, float]

    @property
    def accuracy(self) -> float | None:
        """Return the share of right rows; None if no row was judged."""
        return self.right / self.judged if self.judged else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval of the accuracy (Wilson 1927)."""
        return wilson(self.right, self.judged) if self.judged else None

    def metrics(self) -> dict[str, float]:
        """Return the `eval/...` keys of metrics.jsonl."""
        row: dict[str, float] = {f"eval/{name}": value for name, value in self.reward_means.items()}
        row |= {"eval/count": self.count, "eval/failed_fraction": self.failures.fraction}
        if self.accuracy is not None and self.interval is not None:
            row |= {"eval/accuracy": self.accuracy, "eval/accuracy_low": self.interval[0]}
            row |= {"eval/accuracy_high": self.interval[1], "eval/judged": self.judged}
        return row

    def summary(self) -> str:
        """Return the result as one line for a person."""
        reward, rows = self.reward_means.get("reward/mean"), counted(self.count, "held-out row")
        if reward is None:
            text = f"no reward for any of {rows}"
        else:
            text = f"mean reward {reward:.3f} on {rows}"
            text += f", of which {self.missing} have none" if self.missing else ""
        text += f"; a reward failed on {self.failures.failed}" if self.failures.failed else ""
        if self.accuracy is not None and self.interval is not None:
            low, high = self.interval
            text = f"accuracy {self.accuracy:.3f} (95 % interval {low:.3f} to {high:.3f}), " + text
        return text


class Tally:
    """Adds up greedy completions."""

    def __init__(self) -> None:
        self._verdicts, self._failures = Counter[bool | None](), NO_FAILURES
        self._values: dict[str, array[float]] = {"reward/mean": array("d")}

    def add(
        self,
        total: float | None,
        rewards: Mapping[str, float | None],
        is_correct: bool | None,
        failures: Mapping[str, str],
    ) -> None:
        """Add a completion: its weighted sum, its rewards by name, whether it is right, and the failures of rewards by
        name."""
        first = next(iter(failures.values()), None)
        self._failures += FailureStats(completions=1, failed=int(bool(failures)), first_failure=first)
        self._verdicts[is_correct] += 1
        for name, value in (("", total), *((f"{name}/", value) for name, value in rewards.items())):
            if value is not None:
                self._values.setdefault(f"reward/{name}mean", array("d")).append(value)

    def add_groups(self, scored: Iterable[ScoredGroup]) -> None:
        """Add the completion of each group."""
        for each in (group.completions[0] for group in scored):
            failures = {name: reward.failure for name, reward in each.rewards.items() if reward.failure is not None}
            values = {name: reward.value for name, reward in each.rewards.items()}
            self.add(each.total, values, each.is_correct, failures)

    def evaluation(self, rejected: int) -> Evaluation:
        """Return the score of all of them."""
        count = self._verdicts.total()
        return Evaluation(
            count=count,
            judged=count - self._verdicts[None],
            right=self._verdicts[True],
            missing=count - len(self._values["reward/mean"]),
            failures=self._failures,
            rejected=rejected,
            reward_means={name: statistics.fmean(values) for name, values in self._values.items() if values},
        )


def evaluate_policy(session: Session, trainer: Trainer, rollouts: Rollouts, step: int) -> dict[str, float]:
    """Score the policy after `step` updates on the held-out rows; keep the completions and report the score. The
    returned row is empty if the recipe has no such rows."""
    table, ranks = session.rows.heldout, session.ranks
    if table is None:
        return {}
    started = time.perf_counter()
    ranks.heartbeat.begin("evaluation", step)
    evaluator = Evaluator(
        completion_sampler=rollouts.completion_sampler,
        vision=trainer.vision,
        family=trainer.family,
        recipe=rollouts.recipe,
        scorer=rollouts.scorer,
        ranks=ranks,
        require_no_stop=partial(session.require_no_stop, step),
    )
    tally, rejected = Tally(), list(table.rejected)
    with session.run.recording("evaluations", step, trainer.family) as record:
        with waiting("scoring the held-out rows"), evaluator.completion_sampler.sampler.awake():
            for groups, more in evaluator.batches(table):
                tally.add_groups(record(groups, [[None]] * len(groups)))
                rejected += more
        ranks.run_on_all(lambda: require_few_bad(len(rejected), table.total, evaluator.recipe.data, rejected))
    evaluation = tally.evaluation(len(rejected))
    logger.info(f"held out, step {step}: {evaluation.summary()}")
    ranks.run_on_all(lambda: require_few_failures(evaluation, evaluator.recipe))
    return {**evaluation.metrics(), "eval/time": time.perf_counter() - started}


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluator:
    """Completes held-out rows greedily and scores them; each rank takes its share."""

    completion_sampler: CompletionSampler
    vision: VisionStore
    family: Family
    recipe: GrpoRecipe
    scorer: Scorer
    ranks: Ranks
    require_no_stop: Callable[[], object] = lambda: None  # all ranks call it; it raises on all if the run is to stop

    def evaluate(self, kept: EvaluationSink) -> Evaluation | None:
        """Score every row of data.eval, or return None if the recipe has no such rows. The first rank has the result.
        `kept` gets the completions batch by batch; after those that it has already, the evaluation goes on."""
        table, ranks = heldout_rows(self.recipe, self.ranks), self.ranks
        if table is None:
            return None
        tally = Tally()

        def add(groups: Iterable[GroupRecord]) -> None:
            for completion in (group.completions[0] for group in groups):
                tally.add(completion.total, completion.rewards, completion.is_correct, completion.failures)

        def begin() -> tuple[int, int]:
            begun = kept.begin(partial(table.identity, ranks.heartbeat.beat))
            add(kept.read())
            return begun

        start, bad = ranks.run_on_first(begin)
        rejected, space = list(table.rejected), self.family.coordinate_space
        bad += len(rejected)
        with counting("scoring the held-out rows", len(table.rows), is_first=ranks.is_first) as show:
            for number, (scored, more) in enumerate(self.batches(table, start), start=start + 1):
                gathered = gathered_groups(ranks, scored, [[None]] * len(scored))
                records = [group_record(group, values, space) for group, values in gathered]
                rejected += more
                bad += len(more)
                ranks.run_on_first(partial(kept.add, records, number, bad - len(table.rejected)))
                add(records)
                show(min(number * rows_at_once(self.recipe, ranks.world_size), len(table.rows)))
        evaluation = tally.evaluation(bad)
        ranks.run_on_all(lambda: require_few_bad(bad, table.total, self.recipe.data, rejected))
        if evaluation.failures.failed:
            logger.warning(
                f"a reward failed on {evaluation.failures.failed} of {evaluation.count} rows; the first failure:\n"
                f"{evaluation.failures.first_failure}"
            )
        return evaluation

    def batches(self, table: RowTable, start: int = 0) -> Iterator[tuple[Sequence[ScoredGroup], Sequence[RejectedRow]]]:
        """Yield this rank's share of the rows scored, batch by batch from the batch `start` on, and the rows of each
        batch that all ranks rejected."""
        sampler, ranks = self.completion_sampler, self.ranks
        params = greedy_params(self.recipe.rollout)
        encode = prompt_encoder(self.family, self.recipe.data)
        at_once = rows_at_once(self.recipe, ranks.world_size)
        with heldout_loader(table.rows, encode, self.recipe, ranks, at_once, start) as loader:
            for _ in range(loader.steps_left):
                self.require_no_stop()
                batch = next_batch(loader, ranks)
                prompts = ranks.run_on_all(partial(sampler.begun, batch.prompts))
                groups = ranks.run_on_all(partial(sampler.sample, prompts, params, [0] * len(prompts)))
                self.require_no_stop()
                scored = ranks.run_on_all(partial(self._scored, groups))
                self.vision.end_step()
                yield scored, batch.rejected

    def _scored(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """Score as many completions at a time as a rank has of a step, because reliability.reward_timeout is for as
        many."""
        scored: list[ScoredGroup] = []
        for part in blocks_of(len(groups), _of_step(self.recipe, self.ranks.world_size)):
            scored += self.scorer.score(groups[part.start : part.stop])
            self.ranks.heartbeat.beat()
        return scored


def rows_at_once(recipe: GrpoRecipe, world_size: int) -> int:
    """Return how many rows all ranks sample at a time. With turns it is as many as there are completions in a step,
    because each trajectory has a process, or a session of a server."""
    most = _of_step(recipe, world_size) if recipe.rollout.has_turns else ROWS_AT_ONCE
    return min(most, ROWS_AT_ONCE) * world_size


def _of_step(recipe: GrpoRecipe, world_size: int) -> int:
    """Return how many completions a rank has of a step, at least 1."""
    return max(1, recipe.optim.prompts_per_step * recipe.rollout.group_size // world_size)


def require_few_failures(evaluation: Evaluation, recipe: GrpoRecipe) -> None:
    """Raise TrainingError if a reward failed on more than reliability.max_failed_reward_fraction of the rows."""
    evaluation.failures.require_at_most(recipe.reliability.max_failed_reward_fraction)


def heldout_rows(recipe: BaseRecipe, ranks: Ranks) -> RowTable | None:
    """Read the rows of data.eval; None if the recipe has none. Raises DataError if too many cannot be used."""
    table = ranks.run_on_all(lambda: read_heldout_rows(recipe.data, recipe.purpose, ranks.heartbeat.beat))
    if table is not None:
        ranks.run_on_all(lambda: require_few_bad(len(table.rejected), table.total, recipe.data, table.rejected))
        require_readable(recipe, table)
    return table


def wilson(right: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Return the score interval of a proportion (Wilson 1927)."""
    if count == 0:
        return 0.0, 1.0
    share = right / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def heldout_loader(
    rows: Sequence[Row],
    encode: Callable[[Row, int], Encoded],
    recipe: BaseRecipe,
    ranks: Ranks,
    at_once: int,
    start: int = 0,
) -> StepLoader[Encoded]:
    """Make a loader of this rank's share of the rows, in file order. `at_once` is the number of rows that all ranks
    together load at a time; `start` is the batch to begin with."""
    order = StepOrder(
        rows=file_order(len(rows)),
        prompts_per_step=at_once,
        end=len(rows),
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    steps = math.ceil(len(rows) / order.prompts_per_step)
    return StepLoader(rows, encode, order, start=start, stop=steps, workers=recipe.data.workers)
