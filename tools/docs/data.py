"""Make the table of docs/data.md from FORMATS: `python -m tools.docs.data docs/data.md`."""

import sys
from pathlib import Path

from tiercel.data.formats import FORMATS
from tools.docs.tables import write_table

TABLE = "formats"  # its name in the document


def table() -> str:
    """Return the table, in Markdown: one row for each format."""
    lines = ["| `data.format` | rows | told by the keys | the right answer |", "|---|---|---|---|"]
    for name, each in FORMATS.items():
        lines.append(f"| `{name}` | {each.rows} | {each.marks} | {each.answer} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_table(Path(sys.argv[1]), TABLE, table())
