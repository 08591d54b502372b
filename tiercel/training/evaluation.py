"""Held-out rows: greedy completions scored with training's own prompt and parser, or the loss of SFT."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tiercel.config.schema import BaseRecipe, GrpoRecipe, SftRecipe
from tiercel.data.loader import Encoded, StepLoader, StepOrder
from tiercel.data.reading import read_rows, require_few_bad
from tiercel.learner.batch import conversation_item, packed_bins
from tiercel.learner.layout import pack
from tiercel.models.family import Family
from tiercel.rewards.metrics import reward_statistics
from tiercel.rewards.scoring import Scorer
from tiercel.rollout.sampler import Sampler, greedy_params
from tiercel.training.encoding import conversation_encoder, prompt_encoder
from tiercel.training.update import Engine
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
        """One line for a person."""
        reward = self.reward_means.get("reward/mean", 0.0)
        text = f"mean reward {reward:.3f} on {self.count} held-out rows"
        if self.accuracy is not None and self.interval is not None:
            low, high = self.interval
            text = f"accuracy {self.accuracy:.3f} (95 % interval {low:.3f} to {high:.3f}), " + text
        return text


def evaluate(sampler: Sampler, family: Family, recipe: GrpoRecipe, scorer: Scorer) -> Evaluation | None:
    """Greedy completions of every row of data.eval, scored; None where the recipe has no such rows."""
    if recipe.data.eval is None:
        return None
    table = read_rows(recipe.data.eval, recipe.data, "grpo")
    require_few_bad(len(table.rejected), table.total, recipe.data, table.rejected)
    params = greedy_params(recipe.rollout)
    encode = prompt_encoder(family, recipe.data, recipe.data.eval)
    scored: list[ScoredGroup] = []
    rejected = list(table.rejected)
    with _loader(table.rows, encode, recipe) as loader:
        for batch in loader:
            groups = sampler.sample(batch.prompts, params, [0] * len(batch.prompts))
            scored += scorer.score(groups)
            rejected += batch.rejected
    require_few_bad(len(rejected), table.total, recipe.data, rejected)
    means = {name: value for name, value in reward_statistics(scored).items() if name.endswith("/mean")}
    verdicts = [group.completions[0].is_correct for group in scored]
    knows = any(verdict is not None for verdict in verdicts)
    return Evaluation(
        scored=tuple(scored),
        right=sum(verdict is True for verdict in verdicts) if knows else None,
        rejected=len(rejected),
        reward_means=means,
    )


def heldout_loss(engine: Engine, recipe: SftRecipe) -> dict[str, float]:
    """`eval/loss`, mean negative logprob per scored token of data.eval; nothing where there are no such rows."""
    if recipe.data.eval is None:
        return {}
    table = read_rows(recipe.data.eval, recipe.data, "sft")
    require_few_bad(len(table.rejected), table.total, recipe.data, table.rejected)
    encode = conversation_encoder(engine.policy.family, recipe.data, recipe.data.eval)
    total, tokens = 0.0, 0
    with _loader(table.rows, encode, recipe) as loader, torch.no_grad():
        for batch in loader:
            items = [conversation_item(conversation) for conversation in batch.prompts]
            for bin_ in packed_bins(items, engine.learner.form, recipe.learner.max_tokens_per_microbatch):
                packed = pack([items[i] for i in bin_])
                features_KH = engine.vision.features(packed.images)
                scores = engine.learner(packed, features_KH, 1.0)
                total -= float(scores.logprobs_N.sum())
                tokens += len(packed.targets_N)
            engine.vision.end_step()
    return {"eval/loss": total / max(1, tokens), "eval/count": len(table.rows)}


def wilson(right: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927)."""
    if count == 0:
        return 0.0, 1.0
    share = right / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def _loader(rows: Sequence[Row], encode: Callable[[Row, int], Encoded], recipe: BaseRecipe) -> StepLoader[Encoded]:
    order = StepOrder(row_count=len(rows), seed=0, shuffle=False, prompts_per_step=ROWS_AT_ONCE, end=len(rows))
    steps = math.ceil(len(rows) / ROWS_AT_ONCE)
    return StepLoader(rows, encode, order, start=0, stop=steps, workers=recipe.data.workers)
