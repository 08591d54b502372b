"""The files of a user's function: its own file and the modules next to it that it imports. No code is run."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tiercel.user_functions import call_file, is_call


def files_of_call(call: str) -> list[Path]:
    """List the files of `file.py:function`, or of `package.module:function` if the module is in the working
    directory."""
    file, found = call_file(call), set[Path]()
    root = Path() if file is None else Path(file).parent  # the first entry of sys.path when the function is loaded
    waiting = [Path(file)] if file is not None else _modules(root, call.partition(":")[0] if is_call(call) else "")
    while waiting:
        path = waiting.pop()
        if path not in found and path.is_file():
            found.add(path)
            waiting += [each for name in _imported(path, root) for each in _modules(root, name)]
    return sorted(found)


def _modules(root: Path, name: str) -> list[Path]:
    """List the possible files of a module and of the packages that contain it."""
    parts = [part for part in name.split(".") if part]
    places = [root.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]
    return [file for place in places for file in (place.with_name(f"{place.name}.py"), place / "__init__.py")]


def _imported(path: Path, root: Path) -> Iterator[str]:
    """Yield the names of the modules that a file imports, relative to the root. A file that cannot be read yields
    nothing; running it reports the error."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            inside = path.relative_to(root).parts[: -node.level] if node.level else ()
            module = ".".join([*inside, node.module or ""])
            yield from (f"{module}.{alias.name}" for alias in node.names)
