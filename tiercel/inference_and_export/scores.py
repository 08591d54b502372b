"""Scores on held-out rows by a model that was loaded for inference: GRPO's greedy score, or the loss of other
methods."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tiercel.config import OfflineRecipe, Recipe
from tiercel.devices import training_device
from tiercel.distributed.ranks import Ranks
from tiercel.log import printed
from tiercel.models.policy import Policy, load_start
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.forward_equivalence_check import prove_where_needed
from tiercel.rewards.runtime.scorer import Scorer
from tiercel.rollout.local.engine import LocalSampler
from tiercel.runs.evaluation_groups import EvaluationSink
from tiercel.runs.records import GroupRecord
from tiercel.training.evaluation import Evaluator, heldout_rows
from tiercel.training.grpo.completion_sampling import CompletionSampler, open_dialogues
from tiercel.training.offline.heldout_loss import heldout_loss, loss_in_words, sums_of
from tiercel.training.offline.objectives import ReferenceSums, objective_of
from tiercel.training.policy_passes import passes_for_inference
from tiercel.training.run import fetch
from tiercel.training.session import set_up_numerics

Load = Callable[[Recipe, torch.device], Policy]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelToScore:
    """A model to score: its path, the function that loads it, the adapter that this applies, and what a run's loss
    remembers from earlier steps."""

    path: str
    load: Load
    adapter: Path | None = None
    state: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldoutScore:
    """The result on held-out rows, on the first rank: one line for a person, the keys `eval/...` of metrics.jsonl, and,
    from Python, the completions of a method that samples."""

    line: str
    metrics: Mapping[str, float]
    groups: tuple[GroupRecord, ...] = ()

    @property
    def score(self) -> float:
        """Return the accuracy, else the mean reward, else the loss, for which less is better."""
        wanted = ("eval/accuracy", "eval/reward/mean", "eval/loss")
        return next(self.metrics[name] for name in wanted if name in self.metrics)


def _reference(recipe: OfflineRecipe, ranks: Ranks) -> ReferenceSums | None:
    """Compute the reference of the held-out rows by the model that the run starts from. Returns None if no loss needs
    it."""
    if not recipe.has_reference:
        return None
    policy, rows = load_start(recipe, training_device()), heldout_rows(recipe, ranks)
    assert rows is not None
    prove_where_needed(policy)
    return sums_of(passes_for_inference(policy, recipe, ranks), recipe, rows)


def score(recipe: Recipe, judged: ModelToScore, ranks: Ranks, kept: EvaluationSink) -> HeldoutScore:
    """Score a model on the held-out rows of a recipe. All ranks must call this. `kept` gets the completions of a method
    that samples."""
    set_up_numerics(recipe)
    chosen = recipe.with_values({"model.path": judged.path})
    fetch(chosen, ranks)
    ranks.heartbeat.begin("load", 0)
    known = _reference(recipe, ranks) if isinstance(recipe, OfflineRecipe) else None
    policy = judged.load(chosen, training_device())
    prove_where_needed(policy)
    ranks.heartbeat.begin("evaluation", 0)
    if isinstance(chosen, OfflineRecipe):
        passes, rows = passes_for_inference(policy, chosen, ranks), heldout_rows(chosen, ranks)
        assert rows is not None  # the command's recipe has them
        objective = objective_of(chosen)
        objective.state.update(judged.state)
        row = heldout_loss(passes, objective, chosen, rows, known)
        return HeldoutScore(line=loss_in_words(row, is_of_tokens=recipe.kind != "kto"), metrics=row)
    store, prepacked_bytes = VisionStore(policy, 0), chosen.rollout.prepacked_bytes
    sampler = LocalSampler(policy, store, prepacked_bytes=prepacked_bytes, beat=ranks.heartbeat.beat)
    space = policy.family.coordinate_space
    with (
        printed(is_first=ranks.is_first),
        Scorer(chosen.rewards, chosen.reliability, space) as scorer,
        open_dialogues(chosen, policy.family) as dialogues,
    ):
        evaluator = Evaluator(
            completion_sampler=CompletionSampler(sampler=sampler, dialogues=dialogues),
            vision=store,
            family=policy.family,
            recipe=chosen,
            scorer=scorer,
            ranks=ranks,
        )
        evaluation = evaluator.evaluate(kept)
    assert evaluation is not None
    return HeldoutScore(line=evaluation.summary(), metrics=evaluation.metrics())
