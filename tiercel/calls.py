"""Functions of the user's own that a recipe names, as `file.py:function` or `package.module:function`."""

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
_FILE_CALL = re.compile(r"(?P<file>.+\.py):[A-Za-z_]\w*")
_MODULE_CALL = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class CannotLoad(ValueError):
    """The user's file, module or function cannot be loaded; the message says why and what there is."""


def is_call(call: str) -> bool:
    """Tell whether a text has one of the two forms."""
    return bool(_FILE_CALL.fullmatch(call) or _MODULE_CALL.fullmatch(call))


def call_file(call: str) -> str | None:
    """Give the file of `file.py:function`; None for `package.module:function` and for what is neither."""
    match = _FILE_CALL.fullmatch(call)
    return match["file"] if match else None


def load_module(source: str, prefix: str, *, is_own_process: bool = True) -> ModuleType:
    """Import a file, under its name after `prefix`, or a module. The file's directory, or for a module the working
    directory, comes first on the import path of a process of its own, and last elsewhere, where a file of the user's
    must not hide a package. Raises CannotLoad where there is no such file, and whatever the user's code raises."""
    place = 0 if is_own_process else len(sys.path)
    if not source.endswith(".py"):
        sys.path.insert(place, os.getcwd())
        return importlib.import_module(source)
    path = Path(source).absolute()
    if not path.is_file():
        raise CannotLoad(f"{path} is no file; paths start at the working directory")
    sys.path.insert(place, str(path.parent))
    module_name = f"{prefix}_{path.stem}"  # a file called json.py must not hide json
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses in the file look themselves up there
    spec.loader.exec_module(module)
    return module


def functions_of(module: ModuleType) -> Iterator[str]:
    """Name the public functions that a module defines itself, with classes that can be called once made, and
    environments."""
    for name, value in vars(module).items():
        is_meant = inspect.isfunction(value) or (inspect.isclass(value) and {"__call__", "reset"} & vars(value).keys())
        if is_meant and value.__module__ == module.__name__ and not name.startswith("_"):
            yield name
