"""Read tables: text files of a package with a row in each line, and `|` between columns."""

from collections.abc import Iterator
from importlib.resources import files


def table_rows(package: str, file: str) -> Iterator[list[str]]:
    """Yield the columns of each row of a table, without empty lines and those that begin with `#`."""
    text = (files(package) / file).read_text(encoding="utf-8")
    for line in text.splitlines():
        if line and not line.startswith("#"):
            yield [column.strip() for column in line.split("|")]
