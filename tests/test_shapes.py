"""docs/shapes.md has each letter that a name of the package uses as a suffix for a tensor's shape, and no other."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUFFIX = re.compile(r"[a-z]\w*_([0-9]*[A-Z][A-Z0-9]*)")


def names(file: Path) -> set[str]:
    """Variables, parameters and fields of a module."""
    nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    return (
        {node.id for node in nodes if isinstance(node, ast.Name)}
        | {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        | {node.arg for node in nodes if isinstance(node, ast.arg)}
    )


def test_the_legend_has_the_letters_that_are_used():
    matches = [SUFFIX.fullmatch(name) for file in (ROOT / "tiercel").rglob("*.py") for name in names(file)]
    used = {letter for match in matches if match for letter in match[1] if letter.isalpha()}
    rows = re.findall(r"^\| ([A-Z]) \|", (ROOT / "docs" / "shapes.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == sorted(set(rows)) and set(rows) == used
