"""Rewards that a plugin file registers. The file is parsed, never executed."""

import ast
from pathlib import Path


def registered(file: Path) -> dict[str, str]:
    """Return classes and functions by the names that `orms['name'] = Class` gives them, and all top-level ones by their
    own names; empty where the file cannot be parsed."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    own: dict[str, str] = {}
    named: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            own[node.name] = node.name
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            for target in node.targets:
                match target:
                    case ast.Subscript(value=ast.Name(id="orms"), slice=ast.Constant(value=name)):
                        named[str(name)] = node.value.id
    return {**own, **named}
