"""A model that answers prompts from Python."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiercel.api.given import are_paths, is_rows, write_rows
from tiercel.api.run import Run
from tiercel.config import Recipe as AnyRecipe
from tiercel.config import RewardRecipe
from tiercel.config.schema import Data
from tiercel.distributed.ranks import ALONE
from tiercel.errors import DataError, RecipeError, RunError
from tiercel.image_decoding import png_file
from tiercel.inference_and_export.generate import Generator, as_turns, in_words, load_generator
from tiercel.inference_and_export.scores import HeldoutScore, ModelToScore, score
from tiercel.inference_and_export.weights import CheckpointChoice, trained_weights, with_weights
from tiercel.models.policy import load_for_inference, load_start
from tiercel.runs.evaluation_groups import EvaluationsInMemory
from tiercel.runs.recipe import is_run, recipe_of_model, require_no_redaction
from tiercel.types import Completion, ImageSource


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model wrote. `completions` are all completions; `text` is the first."""

    completions: tuple[Completion, ...]

    @property
    def text(self) -> str:
        return in_words(self.completions[0])

    @property
    def texts(self) -> list[str]:
        return [in_words(completion) for completion in self.completions]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A loaded model with the prompt of its run. `tc.load` returns one."""

    generator: Generator

    def generate(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        images: Sequence[Any] = (),
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        count: int = 1,
        seed: int = 0,
        environment: str | None = None,
    ) -> Answer:
        """Complete a prompt: a text, or turns with `role` and `content`. `images`: paths or Pillow images; `<image>`
        marks their places, else they come first. `max_new_tokens` is by default that of a GRPO run, else 256. Greedy at
        temperature 0; above it, `count` completions are drawn. `environment` names which of the recipe's answers, if
        there are several. Raises DataError for pictures that do not fit the marks."""
        if count > 1 and temperature <= 0:
            raise DataError(
                "count: several completions need a temperature above 0; at 0, all of them would be the same"
            )
        sources = [_source(image) for image in ([images] if _is_picture(images) else images)]
        found = self.generator.complete(
            as_turns(prompt),
            sources,
            count=count,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            environment=environment,
        )
        return Answer(found)


def load(source: Run | str | Path, *, adapter: str | Path | None = None, checkpoint: int | None = None,
         best: bool = False) -> LoadedModel:  # fmt: skip
    """Load what a run has trained, by default at its newest checkpoint, or a model's directory or hub id, with an
    adapter if you name one. Raises RunError or ModelError if it cannot be loaded."""
    run, chosen = _run_of(source), None if adapter is None else Path(adapter)
    if run is None:
        if checkpoint is not None or best:
            raise RecipeError([f"{source} is not a run, so it has no checkpoints; leave out checkpoint and best"])
        return LoadedModel(load_generator(recipe_of_model(str(source)), chosen))
    if chosen is not None and (checkpoint is not None or best):
        raise RecipeError(["adapter: takes the place of a checkpoint of the run; leave out checkpoint and best"])
    recipe = run.recipe
    require_no_redaction(recipe, run.path)
    if isinstance(recipe, RewardRecipe):
        raise RunError(f"{run.path} trained a reward model, which does not generate text; use it as the reward `model`")
    trained = trained_weights(run.path, recipe, CheckpointChoice(step=checkpoint, is_best=best))
    return LoadedModel(load_generator(with_weights(recipe, trained), chosen or trained.adapter))


def evaluate(source: Run | str | Path, rows: Any = None, *, checkpoint: int | None = None, best: bool = False,
             before: bool = False) -> HeldoutScore:  # fmt: skip
    """Score a run on held-out rows, by default its own data.eval, with the prompt and rewards of its training.

    `before` scores the model that it started from. `.score` is the accuracy, else the mean reward, else the loss.
    Raises RecipeError if there are no held-out rows.
    """
    run = _run_of(source)
    if run is None:
        raise RunError(f"{source} is not a run; `tiercel eval RECIPE` scores a model by a recipe")
    recipe = run.recipe
    require_no_redaction(recipe, run.path)
    if rows is not None:
        recipe = recipe.with_values(_held_out(rows, run.path, recipe.data))
    if recipe.data.eval is None:
        raise RecipeError([f"{run.path}: data.eval is not set, so there are no held-out rows; pass some"])
    kept = EvaluationsInMemory()
    if before:
        found = score(recipe, ModelToScore(path=recipe.model.path, load=load_start), ALONE, kept)
        return replace(found, groups=tuple(kept.every))
    trained = trained_weights(run.path, recipe, CheckpointChoice(step=checkpoint, is_best=best))

    def loaded(chosen: AnyRecipe, device: Any) -> Any:
        return load_for_inference(chosen, device, trained.adapter)

    found = score(recipe, ModelToScore(path=trained.model, load=loaded, state=trained.state), ALONE, kept)
    return replace(found, groups=tuple(kept.every))


def _held_out(rows: Any, output: Path, data: Data) -> dict[str, Any]:
    """Return the keys that name held-out rows, which are written into the run if they are in memory."""
    if not is_rows(rows):
        return {"data.eval": tuple(map(str, rows)) if are_paths(rows) else str(rows)}
    written = write_rows(rows, output, data.image_root)
    return {"data.eval": written.file, "data.image_roots": written.admitted(data.image_roots)}


def _run_of(source: Run | str | Path) -> Run | None:
    if isinstance(source, Run):
        return source
    return Run(source) if is_run(Path(source)) else None


def _is_picture(images: Any) -> bool:
    """Return whether this is one picture instead of a list of them."""
    return isinstance(images, str | Path) or hasattr(images, "save")


def _source(image: Any) -> ImageSource:
    """Return a picture in the form that a row contains."""
    if isinstance(image, str | Path):
        return ImageSource(path=os.path.realpath(image))
    if not hasattr(image, "save"):
        raise DataError(f"images: is a {type(image).__name__}, but a picture is a path or a Pillow image")
    try:
        return ImageSource(data=png_file(image))
    except ValueError as error:
        raise DataError(f"images: {error}") from error
