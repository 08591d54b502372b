"""Modules with plug-in types at the places that they had before, for one release."""

from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from warnings import warn

MOVED = {
    "tiercel.distributed.strategy": "tiercel.distributed.strategies.base",
    "tiercel.models.family": "tiercel.models.families.base",
    "tiercel.rewards.entry": "tiercel.rewards.base",
    "tiercel.samples": "tiercel.reward_types",
}
RENAMED = {"tiercel.rewards.entry": {"Entry": "RewardEntry"}}


class MovedModules(MetaPathFinder, Loader):
    """Imports a module by its old name, with a DeprecationWarning that has the new one."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        new = import_module(MOVED[module.__name__])
        warn(f"{module.__name__} has moved to {new.__name__}", DeprecationWarning, stacklevel=2)
        contents = {name: value for name, value in vars(new).items() if not name.startswith("__")}
        renamed = RENAMED.get(module.__name__, {})
        vars(module).update(contents, **{old: contents[name] for old, name in renamed.items()})
