"""How each command reads and checks its recipe. It does not import torch, so a wrong recipe is reported at once."""

import os
from argparse import Namespace
from pathlib import Path

from tiercel.config import GrpoRecipe, Recipe, detect_kind, load_recipe
from tiercel.config.schema import Deepspeed
from tiercel.errors import RecipeError
from tiercel.message_text import counted
from tiercel.runs.adapters import starting_adapter
from tiercel.runs.recipe import is_run, load_run_recipe, recipe_of_model, require_no_redaction


def trained_recipe(arguments: Namespace) -> Recipe:
    """Read the recipe of a training command."""
    return starting_adapter(load_recipe(arguments.command, arguments.recipe, arguments.overrides))


def file_recipe(arguments: Namespace) -> Recipe:
    """Read a recipe of any kind."""
    return _any_kind(arguments.recipe, arguments.overrides)


def checked_recipe(arguments: Namespace) -> Recipe:
    """Read a recipe of any kind, and check the flags given with it."""
    if arguments.report_file is not None and not arguments.fix_report:
        raise RecipeError(
            ["--report-file: is set, but --fix-report is not; add --fix-report, which writes the report"],
            source="check",
        )
    return file_recipe(arguments)


def planned_recipe(arguments: Namespace) -> Recipe:
    """Read a recipe whose rows need not be on this machine, and check the flags given with it."""
    path, overrides = arguments.recipe, arguments.overrides
    if problems := _unused_plan_flags(arguments):
        raise RecipeError(problems, source="plan")
    recipe = _any_kind(path, overrides, check_paths=False)
    limit, given = recipe.data.max_prompt_tokens, arguments.prompt_tokens
    if given is not None and given > limit:
        raise RecipeError(
            [f"--prompt-tokens: is {given}, but must be at most data.max_prompt_tokens ({limit})"], str(path)
        )
    return recipe


def _unused_plan_flags(arguments: Namespace) -> list[str]:
    """Return a problem for each flag that would have no effect."""
    without_fit = {"output": "--output: is set, but --fit is not; add --fit SIZE, which writes it"}
    with_fit = {
        "gpu_memory": "--gpu-memory: is set beside --fit, which names the memory of a GPU; remove one of them",
        "json": "--json: is set beside --fit, which writes a recipe and no plan; plan what it has written with --json",
        "prompt_tokens": "--prompt-tokens: is set beside --fit, which writes data.max_prompt_tokens; set that instead",
    }
    unused = without_fit if arguments.fit is None else with_fit
    return [problem for name, problem in unused.items() if getattr(arguments, name)]


def served_recipe(arguments: Namespace) -> GrpoRecipe:
    """Read a recipe that a server can sample for."""
    recipe = _any_kind(arguments.recipe, arguments.overrides)
    if not isinstance(recipe, GrpoRecipe):
        raise RecipeError([f"{arguments.recipe}: is not a GRPO recipe, so it does not use a server"])
    return recipe


def evaluated_recipe(arguments: Namespace) -> Recipe:
    """Read the recipe of a file or of a run. Raises RecipeError if it names no held-out rows."""
    target = Path(arguments.target)
    if not os.path.isdir(target):
        return _with_heldout(_any_kind(target, arguments.overrides), target)
    if arguments.overrides:
        part, given = ("model", "model.path=") if load_run_recipe(target).lora is None else ("adapter", "--adapter ")
        found = max(target.glob(f"checkpoints/step-*/{part}"), default=target / "checkpoints/step-N" / part)
        raise RecipeError(
            [
                f"{arguments.overrides[0]}: cannot be set here, because a run is evaluated with its own recipe; write "
                f"tiercel eval {target / 'config.yaml'} {arguments.overrides[0]} {given}{found}"
            ]
        )
    recipe = _with_heldout(load_run_recipe(target), target)
    require_no_redaction(recipe, target)
    return recipe


def predicting_recipe(arguments: Namespace) -> Recipe:
    """Read a run's recipe, or make one that contains only the model. Checks the flags as well."""
    images, marks = arguments.image, arguments.prompt.count("<image>")
    if marks not in (0, len(images)):
        raise RecipeError(
            [f"--image: is set {counted(len(images), 'time')}, but the prompt has {counted(marks, '<image> mark')}"],
            source="predict",
        )
    if missing := [f"--image: {image} is not a file" for image in images if not os.path.isfile(image)]:
        raise RecipeError(missing, source="predict")
    path = Path(arguments.model)
    flag = "--best" if arguments.best else "--checkpoint" if arguments.checkpoint is not None else None
    if flag and (not is_run(path) or arguments.adapter is not None):
        what = f"{path}, which is not a run" if arguments.adapter is None else "--adapter, which already names one"
        raise RecipeError([f"{flag}: cannot be used with {what}; remove one of the two"], source="predict")
    if is_run(path):
        if arguments.quantize is not None:
            raise RecipeError(
                ["--quantize: cannot be used with a run, which has its own model.quantize"], source="predict"
            )
        recipe = load_run_recipe(path)
        require_no_redaction(recipe, path)
        return recipe
    recipe = recipe_of_model(arguments.model)
    # Nothing is trained, so the rule that quantized weights need an adapter does not apply.
    return recipe.with_values({"model.quantize": arguments.quantize})


def exported_recipe(arguments: Namespace) -> Recipe:
    """Read the recipe of a run."""
    return load_run_recipe(arguments.run)


def replayed_recipe(arguments: Namespace) -> Recipe:
    """Read the recipe of a run, with overrides, for one process."""
    recipe = load_run_recipe(arguments.run, tuple(arguments.overrides))
    require_no_redaction(recipe, arguments.run)
    return recipe.with_values({"train.strategy": "single", "train.context_parallel": 1, "train.deepspeed": Deepspeed()})


def _any_kind(path: Path, overrides: list[str], *, check_paths: bool = True) -> Recipe:
    return starting_adapter(load_recipe(detect_kind(path, overrides), path, overrides, check_paths=check_paths))


def _with_heldout(recipe: Recipe, target: Path) -> Recipe:
    if recipe.data.eval is None:
        raise RecipeError([f"{target}: data.eval is not set, so there are no held-out rows"])
    return recipe
