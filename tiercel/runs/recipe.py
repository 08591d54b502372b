"""The recipe of a run directory. Imports no torch, so that a command can check it before it loads anything."""

import os
from pathlib import Path
from typing import Any

from tiercel.config import Kind, Recipe, SftRecipe, flatten
from tiercel.config.keys import RECIPES
from tiercel.config.loading import read_tree, recipe_of_tree
from tiercel.config.schema import Data, Learner, Model, Train
from tiercel.config.yaml_text import MOST_BYTES
from tiercel.errors import RunError
from tiercel.regular_files import read_text
from tiercel.reliability.redaction import is_redacted
from tiercel.runs.fresh_start import GIVEN
from tiercel.writing import reading

LONGEST_PROMPT = 32_768  # tokens, for a model without a recipe
MOST_NAMED = 8  # runs in a message


def is_run(path: Path) -> bool:
    """Return whether a path is a run directory; a model's directory, for example, is not."""
    return os.path.isfile(path / "config.yaml")  # not Path.is_file, which raises an error in a folder of another user


def not_a_run(path: Path) -> RunError:
    """Make the error for a path that is not a run directory. It names the runs inside."""
    found = sorted(str(each) for each in path.glob("*") if is_run(each))
    if found:
        more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
        return RunError(f"{path} is not a run, but a folder with runs; name one: {', '.join(found[:MOST_NAMED])}{more}")
    return RunError(f"{path} is not a run: it has no config.yaml")


def load_run_recipe(path: Path, overrides: tuple[str, ...] = ()) -> Recipe:
    """Load the recipe that a run directory was made with. If the run was moved, what Python passed is named where it is
    now. Raises RunError if there is no recipe, and RecipeError if it is wrong."""
    config = path / "config.yaml"
    if not is_run(path):
        raise not_a_run(path)
    with reading(config):
        first = read_text(config, MOST_BYTES).partition("\n")[0]
    kind: Kind = next((kind for kind in RECIPES if first.strip() == f"# tiercel {kind}"), "grpo")
    tree, given = read_tree(config, overrides), path / GIVEN
    before = Path(str(tree.get("output"))) / GIVEN
    if given.is_dir() and not os.path.isdir(before):  # the run was moved
        tree = _renamed(tree, f"{before}/", f"{given}/")
    return recipe_of_tree(kind, tree, str(config), check_paths=False)


def _renamed(value: Any, before: str, now: str) -> Any:
    """Return plain data in which each text that begins with `before` begins with `now`."""
    if isinstance(value, str):
        return now + value.removeprefix(before) if value.startswith(before) else value
    if isinstance(value, list):
        return [_renamed(each, before, now) for each in value]
    return {key: _renamed(each, before, now) for key, each in value.items()} if isinstance(value, dict) else value


def require_no_redaction(recipe: Recipe, path: Path) -> None:
    """Require a recipe that was written in full. Raises RunError if a secret was left out of a value, because the
    recipe in the run directory is then not the one that trained."""
    for key, value in flatten(recipe).items():
        if key != "rollout.urls" and isinstance(value, str) and is_redacted(value):
            raise RunError(
                f"{path / 'config.yaml'}: {key} held a secret and was written without it; pass `tiercel eval` the "
                "recipe file that the run was started with, and an --adapter"
            )


def recipe_of_model(path: str) -> SftRecipe:
    """Return a recipe that contains only a model, for prompts as long as large pictures need. The weights are in
    float32 on a CPU, where bfloat16 is slow, and otherwise in bfloat16."""
    from tiercel.devices import training_device  # imports torch

    model = Model(path=path, dtype="float32" if training_device().type == "cpu" else "bfloat16")
    data = Data(train="-", max_prompt_tokens=LONGEST_PROMPT)
    learner = Learner(max_tokens_per_microbatch=LONGEST_PROMPT)  # no row may be longer
    return SftRecipe(model=model, data=data, learner=learner, train=Train(steps=1), output="-")
