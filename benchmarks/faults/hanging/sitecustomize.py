"""Holds a process at a moment of its start: with this on PYTHONPATH, Python runs this file before anything else.

`HANG_AT` is "python", the name of a module, held before its import, or MODULE:FUNCTION, held when that is called.
`HANG_RANK` is the rank, or "any". `HANG_KIND` is "sleep", for ever, or the name of a signal that the process sends
itself.
"""

import importlib.abc
import importlib.util
import os
import signal
import sys
import time
from types import ModuleType


def hold(*_: object, **__: object) -> None:
    print(f"fault plan: {os.environ['HANG_KIND']} at {os.environ['HANG_AT']}", file=sys.stderr, flush=True)
    if os.environ["HANG_KIND"] == "sleep":
        time.sleep(1e6)
    os.kill(os.getpid(), signal.Signals[os.environ["HANG_KIND"]])


class Holding(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the one module, and holds there, or loads it and puts `hold` in place of the function."""

    def __init__(self, module: str, function: str):
        self.module, self.function = module, function

    def find_spec(self, name: str, path: object, target: object = None) -> object:
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        if not self.function:
            hold()
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: object) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        setattr(module, self.function, hold)


if "RANK" in os.environ and os.environ.get("HANG_RANK") in ("any", os.environ["RANK"]):
    if os.environ["HANG_AT"] == "python":
        hold()
    else:
        sys.meta_path.insert(0, Holding(*os.environ["HANG_AT"].partition(":")[::2]))
