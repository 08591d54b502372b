"""The words of what the rules refuse: a table, from which a rule takes a row by its name."""

from collections.abc import Mapping
from functools import cache

from tiercel.config_base import Keys, Problem
from tiercel.tables import table_rows


def conflict(name: str, *fields: object) -> Problem:
    """Return a problem of conflicts.txt, with these values for what its keys and its text leave open."""
    keys, text = _conflicts()[name]
    return Keys(*(key.format(*fields) for key in keys)).problem(text.format(*fields))


@cache
def _conflicts() -> Mapping[str, tuple[list[str], str]]:
    rows = table_rows("tiercel.config.conflicts", "conflicts.txt")
    return {name: (keys.split(", "), text) for name, keys, text in rows}
