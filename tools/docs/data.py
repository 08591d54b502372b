"""Generate the table of docs/data.md from FORMATS: `python -m tools.docs.data docs/data.md`."""

import sys
from pathlib import Path

from tiercel.data.formats.registry import FORMATS
from tools.docs.recipe import Say
from tools.docs.tables import write_table

TABLE = "formats"  # its name in the document


def table(say: Say = str) -> str:
    """Return the table in Markdown, with one row for each format. `say` translates texts."""
    head = ("rows", "told by the keys", "the right answer")
    lines = [f"| `data.format` | {' | '.join(map(say, head))} |", "|---|---|---|---|"]
    for name, each in FORMATS.items():
        lines.append(f"| `{name}` | {say(each.rows)} | {say(each.marks)} | {say(each.answer)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_table(Path(sys.argv[1]), TABLE, table())
