"""The functions that train. Each takes the keys of its recipe (docs/recipe.md), does the same as the command of its
name, and returns the run that it made."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from typing_extensions import TypedDict, Unpack

from tiercel.api.recipe import PathText, Recipe
from tiercel.api.run import Run
from tiercel.api.running import OPTIONS, OnStep, StepIterator, train
from tiercel.config import Kind

Section = Mapping[str, Any]  # keys of a section of the recipe
Rows = Any  # a path or a list of paths, a list of dicts, a `datasets.Dataset`, or the section `data`
Reward = Any  # a function, the name of a built-in, "file.py:function", an entry of the recipe, or (reward, weight)


class CommonKeys(TypedDict, total=False):
    """The keys of every recipe. `steps`, `lr`, `seed` and `eval` are train.steps, optim.lr, train.seed, data.eval."""

    model: str | Section
    data: Rows
    eval: Rows
    output: PathText
    steps: int
    lr: float
    seed: int
    lora: Section
    freeze: Sequence[str]
    learner: Section
    optim: Section
    train: Section
    reliability: Section
    trackers: Sequence[str]


class GrpoKeys(CommonKeys, total=False):
    """The keys of `tiercel grpo`."""

    rewards: Sequence[Reward] | Reward
    rollout: Section
    algorithm: Section


class DistillKeys(GrpoKeys, total=False):
    """The keys of `tiercel distill`."""

    teacher: str | Section


class SftKeys(CommonKeys, total=False):
    """The keys of `tiercel sft`."""

    sft: Section


class DpoKeys(CommonKeys, total=False):
    """The keys of `tiercel dpo`."""

    dpo: Section


class KtoKeys(CommonKeys, total=False):
    """The keys of `tiercel kto`."""

    kto: Section


class RewardKeys(CommonKeys, total=False):
    """The keys of `tiercel reward`."""

    ranking: Section


FileOrRecipe = PathText | Recipe | None


@overload
def grpo(recipe: FileOrRecipe = None, *, iterate: Literal[True], **keys: Unpack[GrpoKeys]) -> StepIterator: ...
@overload
def grpo(
    recipe: FileOrRecipe = None, *, on_step: OnStep | None = None, nproc: int = 1, **keys: Unpack[GrpoKeys]
) -> Run: ...
def grpo(recipe: FileOrRecipe = None, **keys: Any) -> Run | StepIterator:
    """Train by group-relative policy optimisation, or resume the run at `output`.

    `recipe` is a file or a Recipe; the other arguments are keys that change it. Rows and functions that are in memory
    are written into the run directory. `on_step` is called with each finished step, and may end the run with
    `step.stop()`. `nproc` starts that many ranks. With `iterate=True` you get an iterator over the steps instead of the
    Run.

    Raises RecipeError, with every problem, before anything is loaded.

        run = tc.grpo(model="Qwen/Qwen2.5-VL-3B-Instruct", data=rows, rewards=[right, "format"], lora={"rank": 64},
                      rollout={"group_size": 8}, steps=200, output="runs/x")
    """
    return _train("grpo", recipe, keys)


@overload
def distill(recipe: FileOrRecipe = None, *, iterate: Literal[True], **keys: Unpack[DistillKeys]) -> StepIterator: ...
@overload
def distill(
    recipe: FileOrRecipe = None, *, on_step: OnStep | None = None, nproc: int = 1, **keys: Unpack[DistillKeys]
) -> Run: ...
def distill(recipe: FileOrRecipe = None, **keys: Any) -> Run | StepIterator:
    """Train on completions of the policy with a teacher's distributions. All else is as for `grpo`."""
    return _train("distill", recipe, keys)


@overload
def sft(recipe: FileOrRecipe = None, *, iterate: Literal[True], **keys: Unpack[SftKeys]) -> StepIterator: ...
@overload
def sft(
    recipe: FileOrRecipe = None, *, on_step: OnStep | None = None, nproc: int = 1, **keys: Unpack[SftKeys]
) -> Run: ...
def sft(recipe: FileOrRecipe = None, **keys: Any) -> Run | StepIterator:
    """Train on the assistant turns of the rows. All else is as for `grpo`."""
    return _train("sft", recipe, keys)


@overload
def dpo(recipe: FileOrRecipe = None, *, iterate: Literal[True], **keys: Unpack[DpoKeys]) -> StepIterator: ...
@overload
def dpo(
    recipe: FileOrRecipe = None, *, on_step: OnStep | None = None, nproc: int = 1, **keys: Unpack[DpoKeys]
) -> Run: ...
def dpo(recipe: FileOrRecipe = None, **keys: Any) -> Run | StepIterator:
    """Train on pairs of a chosen and a rejected answer. All else is as for `grpo`."""
    return _train("dpo", recipe, keys)


@overload
def kto(recipe: FileOrRecipe = None, *, iterate: Literal[True], **keys: Unpack[KtoKeys]) -> StepIterator: ...
@overload
def kto(
    recipe: FileOrRecipe = None, *, on_step: OnStep | None = None, nproc: int = 1, **keys: Unpack[KtoKeys]
) -> Run: ...
def kto(recipe: FileOrRecipe = None, **keys: Any) -> Run | StepIterator:
    """Train on answers that are labelled good or bad. All else is as for `grpo`."""
    return _train("kto", recipe, keys)


@overload
def reward(recipe: FileOrRecipe = None, *, iterate: Literal[True], **keys: Unpack[RewardKeys]) -> StepIterator: ...
@overload
def reward(
    recipe: FileOrRecipe = None, *, on_step: OnStep | None = None, nproc: int = 1, **keys: Unpack[RewardKeys]
) -> Run: ...
def reward(recipe: FileOrRecipe = None, **keys: Any) -> Run | StepIterator:
    """Train a reward model on pairs. All else is as for `grpo`."""
    return _train("reward", recipe, keys)


def _train(kind: Kind, recipe: FileOrRecipe, keys: dict[str, Any]) -> Run | StepIterator:
    given = recipe if isinstance(recipe, Recipe) else Recipe() if recipe is None else Recipe.from_file(recipe)
    found = train(kind, given, keys)
    return Run(found) if isinstance(found, Path) else found


def _complete(function: Callable[..., Any], keys: type) -> None:
    """Give a function a signature that lists its keys, which notebooks show and complete."""
    names = list(keys.__annotations__)
    own = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in (*names, *OPTIONS)]
    recipe = inspect.Parameter("recipe", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
    function.__signature__ = inspect.Signature([recipe, *own])  # type: ignore[attr-defined]


for _function, _keys in (
    (grpo, GrpoKeys), (distill, DistillKeys), (sft, SftKeys), (dpo, DpoKeys), (kto, KtoKeys), (reward, RewardKeys)
):  # fmt: skip
    _complete(_function, _keys)
