"""Check the packages of the trackers that a recipe names. Imports no torch."""

from collections.abc import Sequence
from importlib.util import find_spec

from tiercel.config.schema import TrackerName
from tiercel.errors import EnvironmentProblem


def require_packages(names: Sequence[TrackerName]) -> None:
    """Require the packages of these trackers before anything is loaded. Raises EnvironmentProblem with the command that
    installs what is missing."""
    missing = [name for name in names if not _is_installed(name)]
    if missing:
        verb, them = ("is", "it") if len(missing) == 1 else ("are", "them")
        remedy = f"run pip install {' '.join(missing)}, or remove {them} from trackers"
        raise EnvironmentProblem(f"trackers: {', '.join(missing)} {verb} not installed; {remedy}")


def _is_installed(name: str) -> bool:
    spec = find_spec(name)
    # A plain folder of the same name, such as the one that wandb writes, has no origin.
    return spec is not None and spec.origin is not None
