"""The packages and the user's own functions that a recipe needs, looked for before anything is read."""

from importlib.util import find_spec

from tiercel.algorithms.own import load_own_functions
from tiercel.config.schema import BaseRecipe, GrpoRecipe
from tiercel.errors import EnvironmentProblem


def require_installed(recipe: BaseRecipe) -> None:
    """Load the loss and the advantage of the user's own. Raises RecipeError where one cannot be loaded, and
    EnvironmentProblem where the recipe names a strategy or an engine whose package is not installed."""
    if isinstance(recipe, GrpoRecipe):
        load_own_functions(recipe.algorithm)
    if recipe.train.strategy == "deepspeed" and find_spec("deepspeed") is None:
        raise EnvironmentProblem(
            "train.strategy: deepspeed needs the package deepspeed; pip install deepspeed, or write fsdp2, which needs "
            "nothing installed"
        )
    if isinstance(recipe, GrpoRecipe) and recipe.rollout.engine == "vllm" and find_spec("vllm") is None:
        raise EnvironmentProblem("rollout.engine: vllm needs the package vllm; pip install vllm, or write local")
