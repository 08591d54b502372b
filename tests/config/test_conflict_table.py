"""The table of what the rules across keys refuse, against the rules that take its rows."""

import ast
from collections import Counter
from pathlib import Path
from string import Formatter

from tiercel.tables import table_rows

CONFIG = Path(__file__).parents[2] / "tiercel/config"
ROWS = list(table_rows("tiercel.config.conflicts", "conflicts.txt"))


def uses() -> dict[str, set[int]]:
    """Return for each row that a rule takes how many values the rule gives."""
    found: dict[str, set[int]] = {}
    for file in CONFIG.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "conflict":
                name, *fields = node.args
                assert isinstance(name, ast.Constant), f"{file.name}:{node.lineno}"
                assert not any(isinstance(each, ast.Starred) for each in fields), f"{file.name}:{node.lineno}"
                found.setdefault(name.value, set()).add(len(fields))
    return found


def asked_for(text: str) -> set[int]:
    return {int(name) for _, name, _, _ in Formatter().parse(text) if name}


def test_every_row_has_three_columns_and_a_name_of_its_own():
    assert {len(row) for row in ROWS} == {3}
    assert [name for name, count in Counter(row[0] for row in ROWS).items() if count > 1] == []


def test_rules_take_every_row_and_give_each_value_that_it_asks_for():
    taken = uses()
    assert taken.keys() == {name for name, _, _ in ROWS}
    for name, keys, text in ROWS:
        assert taken[name] == {len(asked_for(keys) | asked_for(text))}, name
        assert asked_for(keys) | asked_for(text) == set(range(*taken[name])), name
