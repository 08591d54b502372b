"""Texts about rows and their files that are longer than a line of code: a table, from which code takes a row by its
name."""

from collections.abc import Mapping
from functools import cache

from tiercel.tables import table_rows


def told(name: str, *fields: object) -> str:
    """Return a text of texts.txt, with these values for what it leaves open."""
    return _texts()[name].format(*fields)


@cache
def _texts() -> Mapping[str, str]:
    return {name: text for name, text in table_rows("tiercel.data", "texts.txt")}
