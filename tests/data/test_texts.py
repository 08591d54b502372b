"""The table of texts about rows, against the code that takes them."""

import ast
from collections import Counter
from pathlib import Path
from string import Formatter

import tiercel.data
from tiercel.tables import table_rows

ROWS = list(table_rows("tiercel.data", "texts.txt"))


def uses() -> dict[str, set[int]]:
    """Return for each text that the code takes how many values it gives."""
    found: dict[str, set[int]] = {}
    for file in Path(tiercel.data.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "told":
                name, *fields = node.args
                assert isinstance(name, ast.Constant), f"{file.name}:{node.lineno}"
                assert not any(isinstance(each, ast.Starred) for each in fields), f"{file.name}:{node.lineno}"
                found.setdefault(name.value, set()).add(len(fields))
    return found


def test_every_row_has_two_columns_and_a_name_of_its_own():
    assert {len(row) for row in ROWS} == {2}
    assert [name for name, count in Counter(row[0] for row in ROWS).items() if count > 1] == []


def test_the_code_takes_every_text_and_gives_each_value_that_it_asks_for():
    asked = {name: {field for _, field, _, _ in Formatter().parse(text) if field} for name, text in ROWS}
    assert uses() == {name: {len(fields)} for name, fields in asked.items()}
