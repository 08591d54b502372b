"""The files of a user's function: its own, and the modules beside it that these import. None is run."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tiercel.calls import call_file, is_call


def files_of_call(call: str) -> list[Path]:
    """List the files of `file.py:function`, or of `package.module:function` where that lies in the working
    directory."""
    file, found = call_file(call), list[Path]()
    root = Path() if file is None else Path(file).parent  # which comes first on the path when the function is loaded
    waiting = [Path(file)] if file is not None else _modules(root, call.partition(":")[0] if is_call(call) else "")
    while waiting:
        path = waiting.pop()
        if path not in found and path.is_file():
            found.append(path)
            waiting += [each for name in _imported(path, root) for each in _modules(root, name)]
    return sorted(found)


def _modules(root: Path, name: str) -> list[Path]:
    """List where a module and the packages that it is in may lie."""
    parts = [part for part in name.split(".") if part]
    places = [root.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]
    return [file for place in places for file in (place.with_name(f"{place.name}.py"), place / "__init__.py")]


def _imported(path: Path, root: Path) -> Iterator[str]:
    """Name what a file imports, from the root on; nothing of one that cannot be read, which is told where it is run."""
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
