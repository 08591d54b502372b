"""Packages that the recipe needs and this machine does not have, told with what is left to do."""

from importlib.util import find_spec

from tiercel.config.engines import ENGINE_KINDS
from tiercel.config.strategies import STRATEGY_KINDS
from tiercel.config.tracker_packages import require_packages
from tiercel.errors import EnvironmentProblem
from tiercel.importing.draft import RecipeDraft


def tell_packages(draft: RecipeDraft) -> None:
    """Add a line for each package to install, as `tiercel check` would ask for it."""
    values = draft.values
    strategy, engine = STRATEGY_KINDS.get(values.get("train.strategy", "")), values.get("rollout.engine", "local")
    needed = {
        "model.quantize": "bitsandbytes" if values.get("model.quantize") else None,
        "optim.name": "bitsandbytes" if values.get("optim.name", "adamw") != "adamw" else None,
        "train.strategy": strategy.package if strategy else None,
        "rollout.engine": ENGINE_KINDS[engine].package,
    }
    for key, package in needed.items():
        if package is not None and find_spec(package) is None:
            draft.left.append(f"{key}: needs the package {package}; pip install {package}")
    try:
        require_packages(values.get("trackers", []))
    except EnvironmentProblem as error:
        draft.left.append(str(error))
