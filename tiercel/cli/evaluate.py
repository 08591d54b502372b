"""`tiercel eval`: greedy score on held-out rows, by training's own prompt and parser."""

from collections.abc import Sequence
from pathlib import Path

from tiercel.config import GrpoRecipe, detect_kind, load_recipe
from tiercel.config.schema import BaseRecipe
from tiercel.distributed.ranks import Ranks
from tiercel.errors import RecipeError, RunError
from tiercel.models.policy import load_for_inference
from tiercel.models.vision import VisionStore
from tiercel.rewards.scoring import Scorer
from tiercel.rollout.local import LocalSampler
from tiercel.runs.checkpoints import newest_valid
from tiercel.runs.directory import load_run_recipe, require_no_redaction
from tiercel.training.ending import launched_ranks
from tiercel.training.evaluation import Evaluation, evaluate
from tiercel.training.setup import set_up_numerics, training_device


def evaluate_target(target: Path, overrides: Sequence[str], adapter: Path | None) -> None:
    """A recipe: its model, with `adapter` where one is given. A run: before and after its training."""
    if not target.is_dir():
        recipe = _grpo(load_recipe(detect_kind(target, overrides), target, overrides), target)
        with launched_ranks(recipe) as ranks:
            evaluation = _score(recipe, recipe.model.path, adapter, ranks)
            _say(ranks, f"{adapter or recipe.model.path}: {evaluation.summary()}")
        return
    if overrides:
        raise RecipeError([f"{overrides[0]}: a run is evaluated with its own recipe; name a recipe file instead"])
    recipe = _grpo(load_run_recipe(target), target)
    require_no_redaction(recipe, target)
    start = None if recipe.lora is None or recipe.lora.init is None else Path(recipe.lora.init)
    with launched_ranks(recipe) as ranks:
        _say(ranks, f"before: {_score(recipe, recipe.model.path, start, ranks).summary()}")
        model, trained = (recipe.model.path, adapter) if adapter is not None else trained_weights(target, recipe)
        _say(ranks, f"after:  {_score(recipe, model, trained, ranks).summary()}")


def _say(ranks: Ranks, text: str) -> None:
    if ranks.is_first:
        print(text)


def trained_weights(run: Path, recipe: BaseRecipe) -> tuple[str, Path | None]:
    """Model path and adapter of the run's newest valid checkpoint. Raises RunError where there is none."""
    found = newest_valid(run / "checkpoints", print)
    if found is None:
        raise RunError(f"{run} has no valid checkpoint yet")
    if recipe.lora is None:
        return str(found.path / "model"), None
    return recipe.model.path, found.path / "adapter"


def _grpo(recipe: BaseRecipe, target: Path) -> GrpoRecipe:
    if not isinstance(recipe, GrpoRecipe):
        raise RecipeError([f"{target}: an SFT recipe has no rewards to score with; name a GRPO recipe and --adapter"])
    if recipe.data.eval is None:
        raise RecipeError([f"{target}: data.eval names no held-out rows"])
    return recipe


def _score(recipe: GrpoRecipe, model: str, adapter: Path | None, ranks: Ranks) -> Evaluation:
    set_up_numerics(recipe)
    chosen = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": model})})
    policy = load_for_inference(chosen, training_device(), adapter)
    sampler = LocalSampler(policy, VisionStore(policy, 0), prepacked_bytes=recipe.rollout.prepacked_bytes)
    with Scorer(recipe.rewards, recipe.reliability, policy.family.coordinate_space) as scorer:
        evaluation = evaluate(sampler, policy.family, chosen, scorer, ranks)
    assert evaluation is not None
    return evaluation
