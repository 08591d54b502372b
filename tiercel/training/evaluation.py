"""Held-out rows: greedy completions scored with training's own prompt and parser, or the loss of SFT."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tiercel.config.schema import BaseRecipe, GrpoRecipe, OfflineRecipe
from tiercel.data.encoding import example_encoder, prompt_encoder, require_readable
from tiercel.data.loader import Encoded, StepLoader, StepOrder
from tiercel.data.order import RowOrder
from tiercel.data.reading import RowTable, read_heldout_rows, require_few_bad
from tiercel.distributed.ranks import ALONE, Ranks
from tiercel.models.family import Family
from tiercel.rollout.sampler import greedy_params
from tiercel.runs.recording import gathered_groups
from tiercel.runs.waiting import waiting
from tiercel.scoring.metrics import reward_statistics
from tiercel.scoring.scorer import Scorer
from tiercel.training.minibatches import shared_out
from tiercel.training.objectives import Objective
from tiercel.training.rollouts import Rollouts
from tiercel.training.session import Session
from tiercel.training.step_rows import next_batch
from tiercel.training.trainer import Passes, Trainer
from tiercel.training.turns import Completer
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
        """95 % interval of the accuracy (Wilson 1927)."""
        return None if self.right is None else wilson(self.right, self.count)

    def metrics(self) -> dict[str, float]:
        """Keys `eval/...` of metrics.jsonl."""
        row: dict[str, float] = {f"eval/{name}": value for name, value in self.reward_means.items()}
        row["eval/count"] = self.count
        if self.accuracy is not None and self.interval is not None:
            row |= {"eval/accuracy": self.accuracy, "eval/accuracy_low": self.interval[0]}
            row["eval/accuracy_high"] = self.interval[1]
        return row

    def summary(self) -> str:
        """Write the result as one line for a person."""
        reward = self.reward_means.get("reward/mean", 0.0)
        text = f"mean reward {reward:.3f} on {self.count} held-out rows"
        if self.accuracy is not None and self.interval is not None:
            low, high = self.interval
            text = f"accuracy {self.accuracy:.3f} (95 % interval {low:.3f} to {high:.3f}), " + text
        return text


def evaluate_policy(session: Session, trainer: Trainer, rollouts: Rollouts, step: int) -> dict[str, float]:
    """Score the policy after `step` updates on the held-out rows; keep the completions, say the score. The row is empty
    where the recipe has no such rows."""
    table, ranks = session.read.heldout, session.ranks
    if table is None:
        return {}
    started = time.perf_counter()
    ranks.pulse.begin("evaluation", step)
    completer, family = rollouts.completer, trainer.family
    with waiting(session.say, "scoring the held-out rows"), completer.sampler.awake():
        scored, rejected = heldout_groups(completer, family, rollouts.recipe, rollouts.scorer, ranks, table)
    trainer.vision.end_step()
    no_advantages = [[None] for _ in scored]
    everyone = session.run.record_groups("evaluations", step, family, scored, no_advantages)
    evaluation = judge(everyone, rejected)
    session.say(f"held out, step {step}: {evaluation.summary()}")
    return {**evaluation.metrics(), "eval/time": time.perf_counter() - started}


def evaluate_examples(session: Session, trainer: Trainer, objective: Objective, step: int) -> dict[str, float]:
    """Compute the loss of the policy after `step` updates on the held-out rows; nothing where there are none."""
    session.ranks.pulse.begin("evaluation", step)
    assert isinstance(session.recipe, OfflineRecipe)
    return heldout_loss(trainer, objective, session.recipe, session.read.heldout)


def evaluate(
    completer: Completer, family: Family, recipe: GrpoRecipe, scorer: Scorer, ranks: Ranks = ALONE
) -> Evaluation | None:
    """Greedy completions of every row of data.eval, scored; None where the recipe has no such rows. With ranks, each
    takes its share, and the first has the result."""
    table = heldout_rows(recipe, ranks)
    if table is None:
        return None
    scored, rejected = heldout_groups(completer, family, recipe, scorer, ranks, table)
    return judge([group for group, _ in gathered_groups(ranks, scored, [[None]] * len(scored))], rejected)


def heldout_groups(
    completer: Completer, family: Family, recipe: GrpoRecipe, scorer: Scorer, ranks: Ranks, table: RowTable
) -> tuple[list[ScoredGroup], int]:
    """Complete and score this rank's share of the held-out rows; also return how many rows all ranks rejected."""
    params = greedy_params(recipe.rollout)
    encode = prompt_encoder(family, recipe.data)
    scored: list[ScoredGroup] = []
    rejected = list(table.rejected)
    with _loader(table.rows, encode, recipe, ranks) as loader:
        for _ in range(loader.steps_left):
            batch = next_batch(loader, ranks)
            prompts = ranks.together(partial(completer.begun, batch.prompts))
            groups = ranks.together(partial(completer.sample, prompts, params, [0] * len(prompts)))
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
    """Read the rows of data.eval; None where the recipe has none. Raises DataError where too many cannot be used."""
    table = ranks.together(lambda: read_heldout_rows(recipe.data, recipe.purpose, ranks.pulse.beat))
    if table is not None:
        ranks.together(lambda: require_few_bad(len(table.rejected), table.total, recipe.data, table.rejected))
        require_readable(recipe, table)
    return table


def loss_in_words(row: Mapping[str, float]) -> str:
    """Write what `heldout_loss` found as one line for a person."""
    loss, rows = row["eval/loss"], f"{row['eval/count']} held-out rows"
    if "eval/accuracy" in row:
        return f"accuracy {row['eval/accuracy']:.3f}, margin {row['eval/margin']:.4f}, loss {loss:.4f} on {rows}"
    return f"loss {loss:.4f} (perplexity of tokens {math.exp(min(loss, 700.0)):.4g}) on {rows}"


def heldout_loss(
    passes: Passes, objective: Objective, recipe: OfflineRecipe, table: RowTable | None
) -> dict[str, float]:
    """`eval/loss` on the held-out rows, of pairs `eval/accuracy` and `eval/margin` too; nothing where there are none.
    The parts of a loss that are means over the rows of a step are means over those that are read at once."""
    if table is None:
        return {}
    ranks, sums, examples, loss, weight = passes.ranks, Counter[str](), 0, 0.0, 0
    encode = example_encoder(recipe, passes.family, table.rows, _in_file_order(table.rows))
    with _loader(table.rows, encode, recipe, ranks) as loader, torch.no_grad():
        for _ in range(loader.steps_left):
            made = shared_out(passes, next_batch(loader, ranks).prompts, recipe)
            plan = objective.plan(passes, made)
            shares = []
            for each in passes.example_passes(plan.made):
                ranks.pulse.work_on(each.row_ids)
                features_KH = passes.vision.features(each.packed.images)
                shares.append(objective.share(each, passes.learner(each.packed, features_KH, 1.0), plan))
            of_step = ranks.sum(_added([{"loss": float(share.loss)} | _floats(share.sums) for share in shares]))
            own = plan.tokens if recipe.purpose == "sft" else plan.examples
            loss, weight, examples = loss + of_step.pop("loss") * own, weight + own, examples + plan.examples
            sums.update(of_step)
            passes.vision.end_step()
    found = {name: value / max(1, examples) for name, value in sums.items()}
    pairs = {f"eval/{name}": found[f"pairs/{name}"] for name in ("accuracy", "margin") if f"pairs/{name}" in found}
    return {"eval/loss": loss / max(1, weight), "eval/count": len(table.rows), **pairs}


def _floats(sums: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in sums.items()}


def _added(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Add up rows of the same keys."""
    return {name: sum(row[name] for row in rows) for name in rows[0]}


def wilson(right: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927)."""
    if count == 0:
        return 0.0, 1.0
    share = right / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def _loader(
    rows: Sequence[Row], encode: Callable[[Row, int], Encoded], recipe: BaseRecipe, ranks: Ranks
) -> StepLoader[Encoded]:
    order = StepOrder(
        rows=_in_file_order(rows),
        prompts_per_step=ROWS_AT_ONCE * ranks.world_size,
        end=len(rows),
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    steps = math.ceil(len(rows) / order.prompts_per_step)
    return StepLoader(rows, encode, order, start=0, stop=steps, workers=recipe.data.workers)


def _in_file_order(rows: Sequence[Row]) -> RowOrder:
    return RowOrder(counts=(len(rows),), weights=(1.0,), seed=0, shuffle=False)
