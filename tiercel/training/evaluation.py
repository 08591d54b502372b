"""Held-out rows: greedy completions, scored with training's own prompt and parser."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tiercel.config.schema import BaseRecipe, GrpoRecipe
from tiercel.data.encoding import prompt_encoder, require_readable
from tiercel.data.loader import Encoded, StepLoader, StepOrder
from tiercel.data.order import file_order
from tiercel.data.reading import RowTable, read_heldout_rows, require_few_bad
from tiercel.distributed.ranks import ALONE, Ranks
from tiercel.log import logger
from tiercel.models.families.base import Family
from tiercel.rewards.runtime.metrics import reward_statistics
from tiercel.rewards.runtime.scorer import Scorer
from tiercel.rollout.sampler import greedy_params
from tiercel.runs.progress import waiting
from tiercel.runs.recording import gathered_groups
from tiercel.training.grpo.policy_sync import CompletionSampler
from tiercel.training.grpo.rollouts import Rollouts
from tiercel.training.session import Session
from tiercel.training.step_batches import next_batch
from tiercel.training.trainer import Trainer
from tiercel.types import Row, ScoredGroup

ROWS_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Greedy score on held-out rows. A row that could not be scored counts as wrong."""

    scored: tuple[ScoredGroup, ...]
    right: int | None  # None: no reward of the recipe tells right from wrong
    rejected: int
    reward_means: dict[str, float]

    @property
    def count(self) -> int:
        return len(self.scored)

    @property
    def accuracy(self) -> float | None:
        return None if self.right is None else self.right / max(1, self.count)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return the 95 % interval of the accuracy (Wilson 1927)."""
        return None if self.right is None else wilson(self.right, self.count)

    def metrics(self) -> dict[str, float]:
        """Return the `eval/...` keys of metrics.jsonl."""
        row: dict[str, float] = {f"eval/{name}": value for name, value in self.reward_means.items()}
        row["eval/count"] = self.count
        if self.accuracy is not None and self.interval is not None:
            row |= {"eval/accuracy": self.accuracy, "eval/accuracy_low": self.interval[0]}
            row["eval/accuracy_high"] = self.interval[1]
        return row

    def summary(self) -> str:
        """Return the result as one line for a person."""
        reward = self.reward_means.get("reward/mean")
        missing = sum(group.completions[0].total is None for group in self.scored)
        if reward is None:
            text = f"no reward for any of {self.count} held-out rows"
        else:
            text = f"mean reward {reward:.3f} on {self.count} held-out rows"
            text += f", of which {missing} have none" if missing else ""
        if self.accuracy is not None and self.interval is not None:
            low, high = self.interval
            text = f"accuracy {self.accuracy:.3f} (95 % interval {low:.3f} to {high:.3f}), " + text
        return text


def evaluate_policy(session: Session, trainer: Trainer, rollouts: Rollouts, step: int) -> dict[str, float]:
    """Score the policy after `step` updates on the held-out rows; keep the completions and report the score. The
    returned row is empty if the recipe has no such rows."""
    table, ranks = session.read.heldout, session.ranks
    if table is None:
        return {}
    started = time.perf_counter()
    ranks.heartbeat.begin("evaluation", step)
    completion_sampler, family = rollouts.completion_sampler, trainer.family
    with waiting("scoring the held-out rows"), completion_sampler.sampler.awake():
        scored, rejected = heldout_groups(completion_sampler, family, rollouts.recipe, rollouts.scorer, ranks, table)
    trainer.vision.end_step()
    no_advantages = [[None] for _ in scored]
    everyone = session.run.record_groups("evaluations", step, family, scored, no_advantages)
    evaluation = judge(everyone, rejected)
    logger.info(f"held out, step {step}: {evaluation.summary()}")
    return {**evaluation.metrics(), "eval/time": time.perf_counter() - started}


def evaluate(
    completion_sampler: CompletionSampler, family: Family, recipe: GrpoRecipe, scorer: Scorer, ranks: Ranks = ALONE
) -> Evaluation | None:
    """Score greedy completions of every row of data.eval, or return None if the recipe has no such rows. With several
    ranks, each takes its share, and the first has the result."""
    table = heldout_rows(recipe, ranks)
    if table is None:
        return None
    scored, rejected = heldout_groups(completion_sampler, family, recipe, scorer, ranks, table)
    return judge([group for group, _ in gathered_groups(ranks, scored, [[None]] * len(scored))], rejected)


def heldout_groups(
    completion_sampler: CompletionSampler,
    family: Family,
    recipe: GrpoRecipe,
    scorer: Scorer,
    ranks: Ranks,
    table: RowTable,
) -> tuple[list[ScoredGroup], int]:
    """Complete and score this rank's share of the held-out rows; also return how many rows all ranks rejected."""
    params = greedy_params(recipe.rollout)
    encode = prompt_encoder(family, recipe.data)
    scored: list[ScoredGroup] = []
    rejected = list(table.rejected)
    with heldout_loader(table.rows, encode, recipe, ranks, ROWS_AT_ONCE * ranks.world_size) as loader:
        for _ in range(loader.steps_left):
            batch = next_batch(loader, ranks)
            prompts = ranks.together(partial(completion_sampler.begun, batch.prompts))
            groups = ranks.together(partial(completion_sampler.sample, prompts, params, [0] * len(prompts)))
            scored += ranks.together(partial(scorer.score, groups))
            rejected += batch.rejected
    ranks.together(lambda: require_few_bad(len(rejected), table.total, recipe.data, rejected))
    return scored, len(rejected)


def judge(scored: Sequence[ScoredGroup], rejected: int) -> Evaluation:
    """Compute the numbers of an evaluation from the groups of all ranks."""
    means = {name: value for name, value in reward_statistics(scored).items() if name.endswith("/mean")}
    verdicts = [group.completions[0].is_correct for group in scored]
    knows = any(verdict is not None for verdict in verdicts)
    return Evaluation(
        scored=tuple(scored),
        right=sum(verdict is True for verdict in verdicts) if knows else None,
        rejected=rejected,
        reward_means=means,
    )


def heldout_rows(recipe: BaseRecipe, ranks: Ranks) -> RowTable | None:
    """Read the rows of data.eval; None if the recipe has none. Raises DataError if too many cannot be used."""
    table = ranks.together(lambda: read_heldout_rows(recipe.data, recipe.purpose, ranks.heartbeat.beat))
    if table is not None:
        ranks.together(lambda: require_few_bad(len(table.rejected), table.total, recipe.data, table.rejected))
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
    rows: Sequence[Row], encode: Callable[[Row, int], Encoded], recipe: BaseRecipe, ranks: Ranks, at_once: int
) -> StepLoader[Encoded]:
    """Make a loader of this rank's share of the rows, in file order. `at_once` is the number of rows that all ranks
    together load at a time."""
    order = StepOrder(
        rows=file_order(len(rows)),
        prompts_per_step=at_once,
        end=len(rows),
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    steps = math.ceil(len(rows) / order.prompts_per_step)
    return StepLoader(rows, encode, order, start=0, stop=steps, workers=recipe.data.workers)
