"""Make the table of docs/data.md from FORMATS: `python -m tools.docs.data docs/data.md`."""

import inspect
import sys
from pathlib import Path

from tiercel.data.formats import ANSWERS, FORMATS, MARKS
from tools.docs.tables import write_table

NAME = "formats"


def table() -> str:
    """List every format in a row, with the first sentence of its converter's docstring."""
    lines = ["| `data.format` | rows | told by the keys | the right answer |", "|---|---|---|---|"]
    for name, convert in FORMATS.items():
        rows = " ".join((inspect.getdoc(convert) or "").split()).split(". ")[0].removesuffix(".")
        lines.append(f"| `{name}` | {rows} | {MARKS[name]} | {ANSWERS[name]} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_table(Path(sys.argv[1]), NAME, table())
