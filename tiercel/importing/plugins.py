"""Rewards that a plugin file registers. The file is parsed, never executed."""

import ast
from collections.abc import Iterator
from pathlib import Path


def registered(file: Path) -> dict[str, str]:
    """Return classes and functions by the names that `orms['name'] = Class` gives them, and all top-level ones by their
    own names; empty where the file cannot be parsed."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError, RecursionError):
        return {}
    own = {
        node.name: node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return {**own, **dict(_assigned(tree))}


def _assigned(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Name):
            continue
        for target in node.targets:
            if (
                isinstance(target, ast.Subscript)
                and isinstance(target.value, ast.Name)
                and target.value.id == "orms"
                and isinstance(target.slice, ast.Constant)
            ):
                yield str(target.slice.value), node.value.id
