"""`tiercel eval`: score held-out rows with the prompt and parser of training: GRPO's greedy score, SFT's loss."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from tiercel.cli.trained_weights import Trained, trained_weights
from tiercel.config import GrpoRecipe, OfflineRecipe, Recipe
from tiercel.devices import training_device
from tiercel.distributed.ranks import Ranks
from tiercel.errors import RecipeError
from tiercel.models.policy import Policy, load_for_inference, load_start
from tiercel.models.vision_cache import VisionStore
from tiercel.packing.proof import prove_where_needed
from tiercel.reliability.heartbeat import Heartbeat
from tiercel.rewards.runtime.scorer import Scorer
from tiercel.rollout.local.engine import LocalSampler
from tiercel.runs.files import json_line
from tiercel.runs.recording import group_record
from tiercel.runs.records import GroupRecord
from tiercel.training.evaluation import evaluate, heldout_rows
from tiercel.training.grpo.policy_sync import Completer, open_dialogues
from tiercel.training.offline.heldout_loss import heldout_loss, loss_in_words, sums_of
from tiercel.training.offline.objectives import Known, objective_of
from tiercel.training.policy_passes import passes_for_inference
from tiercel.training.run import fetch, launched_ranks
from tiercel.training.session import set_up_numerics
from tiercel.writing import write_text

Load = Callable[[Recipe, torch.device], Policy]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Judged:
    """A model to score: its path, what loads it, and what a run's loss keeps of earlier steps."""

    path: str
    load: Load
    state: Mapping[str, float] = field(default_factory=dict)


def run(recipe: Recipe, arguments: Namespace, heartbeat: Heartbeat) -> None:
    """Evaluate the model of a recipe, with an adapter where one is given; or a run, before and after its training.
    `heartbeat`: the pulse of this process, which the watchdog reads."""
    output: Path | None = arguments.output
    if output is not None and not isinstance(recipe, GrpoRecipe):
        reason = f"{recipe.kind} has a held-out loss, and no completions to write"
        raise RecipeError([f"--output {output}: {reason}; leave --output out"])
    if output is not None and (output.is_dir() or not output.parent.is_dir()):
        raise RecipeError([f"--output {output}: name a file in a directory that is there"])
    with launched_ranks(recipe, heartbeat) as ranks:
        for name, judged in _judged(recipe, Path(arguments.target), arguments.adapter).items():
            said, groups = _score(recipe, judged, ranks)
            if ranks.is_first:
                print(f"{name} {said}")
        if output is not None:
            lines = [json_line(record.as_json()) for record in groups]
            ranks.on_first(lambda: write_text(output, "".join(lines)))


def _judged(recipe: Recipe, target: Path, adapter: Path | None) -> dict[str, _Judged]:
    """Return what to score, by the name that stands before its score."""
    if not target.is_dir():
        load = partial(load_for_inference, adapter=adapter)
        return {f"{adapter or recipe.model.path}:": _Judged(path=recipe.model.path, load=load)}
    given = None if adapter is None else Trained(model=recipe.model.path, adapter=adapter, state={})
    trained = given or trained_weights(target, recipe)
    load = partial(load_for_inference, adapter=trained.adapter)
    return {
        "before:": _Judged(path=recipe.model.path, load=load_start),
        "after: ": _Judged(path=trained.model, load=load, state=trained.state),
    }


def _reference(recipe: OfflineRecipe, ranks: Ranks) -> Known | None:
    """Compute the reference of the held-out rows by the model that the run starts from; None where no loss needs it."""
    if not recipe.has_reference:
        return None
    policy, rows = load_start(recipe, training_device()), heldout_rows(recipe, ranks)
    assert rows is not None
    return sums_of(passes_for_inference(policy, recipe, ranks), recipe, rows)


def _score(recipe: Recipe, judged: _Judged, ranks: Ranks) -> tuple[str, list[GroupRecord]]:
    """Return one line on a model and the held-out rows, and, on the first rank, the completions that it wrote."""
    set_up_numerics(recipe)
    chosen = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": judged.path})})
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
        return loss_in_words(heldout_loss(passes, objective, chosen, rows, known)[0]), []
    store, prepacked_bytes = VisionStore(policy, 0), chosen.rollout.prepacked_bytes
    sampler = LocalSampler(policy, store, prepacked_bytes=prepacked_bytes, beat=ranks.heartbeat.beat)
    space = policy.family.coordinate_space
    with (
        Scorer(chosen.rewards, chosen.reliability, space) as scorer,
        open_dialogues(chosen, policy.family, print if ranks.is_first else lambda text: None) as dialogues,
    ):
        completer = Completer(sampler=sampler, dialogues=dialogues)
        evaluation = evaluate(completer, policy.family, chosen, scorer, ranks)
    assert evaluation is not None
    return evaluation.summary(), [group_record(group, [None], space) for group in evaluation.scored]
