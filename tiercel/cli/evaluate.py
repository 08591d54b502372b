"""`tiercel eval`: score held-out rows with the prompt and parser of training, by GRPO's greedy score or SFT's loss."""

import os
from argparse import Namespace
from functools import partial
from pathlib import Path

from tiercel.config import GrpoRecipe, Recipe
from tiercel.errors import RecipeError
from tiercel.inference_and_export.scores import ModelToScore, score
from tiercel.inference_and_export.weights import Trained, trained_weights
from tiercel.models.policy import load_for_inference, load_start
from tiercel.reliability.heartbeat import Heartbeat
from tiercel.runs.evaluation_groups import EvaluationsFile, EvaluationSink
from tiercel.runs.identity import digest_of, identity
from tiercel.training.evaluation import rows_at_once
from tiercel.training.run import launched_ranks


def run(recipe: Recipe, arguments: Namespace, heartbeat: Heartbeat) -> None:
    """Evaluate the model of a recipe, with an adapter if one is given, or a run before and after its training.
    `heartbeat` is this process's heartbeat, which the watchdog reads."""
    output: Path | None = arguments.output
    if output is not None and not isinstance(recipe, GrpoRecipe):
        reason = f"{recipe.kind} has a held-out loss, but no completions to write"
        raise RecipeError([f"--output {output}: {reason}; remove --output"])
    if output is not None and (os.path.isdir(output) or not os.path.isdir(output.parent)):
        raise RecipeError([f"--output {output}: its directory does not exist; name a file in an existing directory"])
    with launched_ranks(recipe, heartbeat) as ranks:
        written: list[EvaluationsFile] = []
        for name, judged in _judged(recipe, Path(arguments.target), arguments.adapter).items():
            kept = EvaluationSink()
            if output is not None and isinstance(recipe, GrpoRecipe):
                adapter = None if judged.adapter is None else digest_of(str(judged.adapter))
                of_model = identity(recipe.with_values({"model.path": judged.path}))
                at_once = rows_at_once(recipe, ranks.world_size)
                kept = EvaluationsFile(output, len(written), [of_model, adapter, at_once])
                written.append(kept)
            found = score(recipe, judged, ranks, kept)
            if ranks.is_first:
                print(f"{name} {found.line}")
        for each in written:
            ranks.run_on_first(partial(each.finish, is_kept=each is written[-1]))


def _judged(recipe: Recipe, target: Path, adapter: Path | None) -> dict[str, ModelToScore]:
    """Return each model to score under the label that is printed before its score. Of a recipe, it is the model that a
    run would start from, unless an adapter is given."""
    if not os.path.isdir(target):
        load = load_start if adapter is None else partial(load_for_inference, adapter=adapter)
        start = None if recipe.lora is None or recipe.lora.init is None else Path(recipe.lora.init)
        judged = ModelToScore(path=recipe.model.path, load=load, adapter=adapter or start)
        return {f"{judged.adapter or recipe.model.path}:": judged}
    given = None if adapter is None else Trained(model=recipe.model.path, adapter=adapter, state={})
    trained = given or trained_weights(target, recipe)
    load = partial(load_for_inference, adapter=trained.adapter)
    return {
        "before:": ModelToScore(path=recipe.model.path, load=load_start),
        "after: ": ModelToScore(path=trained.model, load=load, adapter=trained.adapter, state=trained.state),
    }
