"""The user's own functions that a recipe names, as `file.py:function` or `package.module:function`."""

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

CALL_FORM = "file.py:function or package.module:function"
OPENENV = "openenv:"  # what begins an environment on a server of OpenEnv; its address follows
OPENENV_FORM = f"{OPENENV}http://HOST:PORT"
_OPENENV_SERVER = re.compile(rf"{OPENENV}https?://[^\s/?#@]+(/[^\s?#@]*)?")
_FILE_CALL = re.compile(r"(?P<file>.+\.py):[A-Za-z_]\w*")
_MODULE_CALL = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class CannotLoad(ValueError):
    """Raised if the user's file, module or function cannot be loaded. The message says why and what exists."""


def is_call(call: str) -> bool:
    """Return whether a text has one of the two forms."""
    return bool(_FILE_CALL.fullmatch(call) or _MODULE_CALL.fullmatch(call))


def is_openenv(environment: str) -> bool:
    """Return whether a text names a server of OpenEnv, by an address without a user, a query or a fragment."""
    return _OPENENV_SERVER.fullmatch(environment) is not None


def call_file(call: str) -> str | None:
    """Return the file of `file.py:function`, or None for `package.module:function` and for any other text."""
    match = _FILE_CALL.fullmatch(call)
    return match["file"] if match else None


def load_module(source: str, prefix: str, *, is_own_process: bool = True) -> ModuleType:
    """Import a file, under its name after `prefix`, or a module. The file's directory, or for a module the working
    directory, goes first on the import path in a process of its own. Elsewhere it goes last, so that a user's file
    cannot hide a package. Raises CannotLoad if the file does not exist, and any error that the user's code raises."""
    place = 0 if is_own_process else len(sys.path)
    if not source.endswith(".py"):
        sys.path.insert(place, os.getcwd())
        return importlib.import_module(source)
    path = Path(source).absolute()
    if not path.is_file():
        raise CannotLoad(f"{path} is not a file; relative paths start at the working directory")
    sys.path.insert(place, str(path.parent))
    module_name = f"{prefix}_{path.stem}"  # with the prefix, a file called json.py does not hide json
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses in the file look themselves up there
    spec.loader.exec_module(module)
    return module


def functions_of(module: ModuleType) -> Iterator[str]:
    """Yield the names of the public functions that a module itself defines, of its classes whose objects can be called,
    and of its environments."""
    for name, value in vars(module).items():
        is_meant = inspect.isfunction(value) or (inspect.isclass(value) and {"__call__", "reset"} & vars(value).keys())
        if is_meant and value.__module__ == module.__name__ and not name.startswith("_"):
            yield name
