"""The packages and the user's own functions that a recipe needs, looked for before anything is read."""

from functools import partial
from importlib.util import find_spec

from tiercel.algorithms.section import load_own_functions
from tiercel.config.schema import BaseRecipe, GrpoRecipe
from tiercel.config.tracker_packages import require_packages
from tiercel.errors import EnvironmentProblem
from tiercel.models.quantized import require_package


def require_installed(recipe: BaseRecipe) -> None:
    """Load the loss and the advantage of the user's own. Raises RecipeError where one cannot be loaded, and
    EnvironmentProblem where the recipe names a strategy or an engine whose package is not installed."""
    if isinstance(recipe, GrpoRecipe):
        load_own_functions(recipe.algorithm)
    if recipe.model.quantize is not None:
        require_package("model.quantize")
    if recipe.optim.name != "adamw":
        require_package("optim.name")
    engine = recipe.rollout.engine_kind if isinstance(recipe, GrpoRecipe) else None
    for key, kind, instead in (
        ("train.strategy", recipe.train.strategy_kind, "fsdp2, which needs nothing installed"),
        ("rollout.engine", engine, "local"),
    ):
        if kind is not None and kind.package is not None and find_spec(kind.package) is None:
            raise EnvironmentProblem(
                f"{key}: {kind.name} needs the package {kind.package}; pip install {kind.package}, or write {instead}"
            )


def missing_packages(recipe: BaseRecipe) -> list[EnvironmentProblem]:
    """Return what is to be installed for the recipe: of its trackers, and the first of the rest. Raises RecipeError
    where a function of the user's own cannot be loaded."""
    found = []
    for require in (partial(require_packages, recipe.trackers), partial(require_installed, recipe)):
        try:
            require()
        except EnvironmentProblem as error:
            found.append(error)
    return found
