"""The packages and the user's own functions that a recipe needs, looked for before anything is read."""

from importlib.util import find_spec

from tiercel.algorithms.section import load_own_functions
from tiercel.config.schema import BaseRecipe, GrpoRecipe
from tiercel.errors import EnvironmentProblem


def require_installed(recipe: BaseRecipe) -> None:
    """Load the loss and the advantage of the user's own. Raises RecipeError where one cannot be loaded, and
    EnvironmentProblem where the recipe names a strategy or an engine whose package is not installed."""
    if isinstance(recipe, GrpoRecipe):
        load_own_functions(recipe.algorithm)
    strategy = recipe.train.strategy_kind
    if strategy is not None and strategy.package is not None and find_spec(strategy.package) is None:
        raise EnvironmentProblem(
            f"train.strategy: {strategy.name} needs the package {strategy.package}; pip install {strategy.package}, or "
            "write fsdp2, which needs nothing installed"
        )
    engine = recipe.rollout.engine_kind if isinstance(recipe, GrpoRecipe) else None
    if engine is not None and engine.package is not None and find_spec(engine.package) is None:
        raise EnvironmentProblem(
            f"rollout.engine: {engine.name} needs the package {engine.package}; pip install {engine.package}, or write "
            "local"
        )
