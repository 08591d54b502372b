"""`tiercel eval`: score held-out rows with the prompt and parser of training: GRPO's greedy score, SFT's loss."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from tiercel.config import OfflineRecipe, Recipe
from tiercel.config.schema import BaseRecipe
from tiercel.distributed.ranks import Ranks
from tiercel.errors import RunError
from tiercel.learner.proof import prove_where_needed
from tiercel.models.policy import Policy, load_for_inference, load_start
from tiercel.models.vision import VisionStore
from tiercel.reliability.pulse import Pulse
from tiercel.rollout.local import LocalSampler
from tiercel.runs.checkpoints import newest_valid
from tiercel.scoring.scorer import Scorer
from tiercel.training.checkpointing import OBJECTIVE
from tiercel.training.evaluation import evaluate, heldout_rows
from tiercel.training.heldout_loss import heldout_loss, loss_in_words, sums_of
from tiercel.training.learners import passes_for_inference, training_device
from tiercel.training.objectives import Known, objective_of
from tiercel.training.run import fetch, launched_ranks
from tiercel.training.session import set_up_numerics
from tiercel.training.turns import Completer, open_dialogues

Load = Callable[[Recipe, torch.device], Policy]


def run(recipe: Recipe, arguments: Namespace, pulse: Pulse) -> None:
    """Evaluate the model of a recipe, with an adapter where one is given; or a run, before and after its training.
    `pulse`: the pulse of this process, which the watchdog reads."""
    target, adapter = Path(arguments.target), arguments.adapter
    if not target.is_dir():
        with launched_ranks(recipe, pulse) as ranks:
            load = partial(load_for_inference, adapter=adapter)
            _say(ranks, f"{adapter or recipe.model.path}: {_score(recipe, recipe.model.path, load, ranks, {})}")
        return
    with launched_ranks(recipe, pulse) as ranks:
        _say(ranks, f"before: {_score(recipe, recipe.model.path, load_start, ranks, {})}")
        model, trained, state = (recipe.model.path, adapter, {}) if adapter else trained_weights(target, recipe)
        load = partial(load_for_inference, adapter=trained)
        _say(ranks, f"after:  {_score(recipe, model, load, ranks, state)}")


def _say(ranks: Ranks, text: str) -> None:
    if ranks.is_first:
        print(text)


def trained_weights(run: Path, recipe: BaseRecipe) -> tuple[str, Path | None, Mapping[str, float]]:
    """Return the model path and the adapter of the run's newest valid checkpoint, and what its loss keeps of earlier
    steps. Raises RunError where there is none."""
    found = newest_valid(run / "checkpoints", print)
    if found is None:
        raise RunError(f"{run} has no valid checkpoint yet")
    state = found.state.get(OBJECTIVE, {})
    if recipe.lora is None:
        return str(found.path / "model"), None, state
    return recipe.model.path, found.path / "adapter", state


def _reference(recipe: OfflineRecipe, ranks: Ranks) -> Known | None:
    """Compute the reference of the held-out rows by the model that the run starts from; None where no loss needs it."""
    if not recipe.has_reference:
        return None
    policy, rows = load_start(recipe, training_device()), heldout_rows(recipe, ranks)
    assert rows is not None
    return sums_of(passes_for_inference(policy, recipe, ranks), recipe, rows)


def _score(recipe: Recipe, model: str, load: Load, ranks: Ranks, state: Mapping[str, float]) -> str:
    """Return one line on the model's held-out rows. `state`: what the run's loss keeps of earlier steps."""
    set_up_numerics(recipe)
    chosen = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": model})})
    fetch(chosen, ranks)
    ranks.pulse.begin("load", 0)
    known = _reference(recipe, ranks) if isinstance(recipe, OfflineRecipe) else None
    policy = load(chosen, training_device())
    prove_where_needed(policy)
    ranks.pulse.begin("evaluation", 0)
    if isinstance(chosen, OfflineRecipe):
        passes, rows = passes_for_inference(policy, chosen, ranks), heldout_rows(chosen, ranks)
        assert rows is not None  # the command's recipe has them
        objective = objective_of(chosen)
        objective.state.update(state)
        return loss_in_words(heldout_loss(passes, objective, chosen, rows, known)[0])
    store, prepacked_bytes = VisionStore(policy, 0), chosen.rollout.prepacked_bytes
    sampler = LocalSampler(policy, store, prepacked_bytes=prepacked_bytes, beat=ranks.pulse.beat)
    with (
        Scorer(chosen.rewards, chosen.reliability, policy.family.coordinate_space) as scorer,
        open_dialogues(chosen, policy.family, partial(_say, ranks)) as dialogues,
    ):
        completer = Completer(sampler=sampler, dialogues=dialogues)
        evaluation = evaluate(completer, policy.family, chosen, scorer, ranks)
    assert evaluation is not None
    return evaluation.summary()
