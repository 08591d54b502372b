"""The packages that a recipe's strategy and engine need, asked for before anything is read."""

from importlib.util import find_spec

from tiercel.config.schema import BaseRecipe, GrpoRecipe
from tiercel.errors import EnvironmentProblem


def require_installed(recipe: BaseRecipe) -> None:
    """Raises EnvironmentProblem where the recipe names a strategy or an engine whose package is not installed."""
    if recipe.train.strategy == "deepspeed" and find_spec("deepspeed") is None:
        raise EnvironmentProblem(
            "train.strategy: deepspeed needs the package deepspeed; pip install deepspeed, or write fsdp2, which needs "
            "nothing installed"
        )
    if isinstance(recipe, GrpoRecipe) and recipe.rollout.engine == "vllm" and find_spec("vllm") is None:
        raise EnvironmentProblem("rollout.engine: vllm needs the package vllm; pip install vllm, or write local")
