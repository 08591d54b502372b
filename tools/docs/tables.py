"""Tables in docs/ that are generated from dicts of the code, each between two lines that a reader does not see."""

from pathlib import Path

_END = "<!-- end -->\n"


def with_table(document: str, name: str, table: str) -> str:
    """Return the document with `table` between `<!-- name -->` and `<!-- end -->`."""
    start = f"<!-- {name} -->\n"
    before, rest = document.split(start)
    return f"{before}{start}{table}{_END}{rest.split(_END, 1)[1]}"


def write_table(file: Path, name: str, table: str) -> None:
    """Write `table` into a file, like `with_table`."""
    file.write_text(with_table(file.read_text(encoding="utf-8"), name, table), encoding="utf-8")
