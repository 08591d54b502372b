"""Generate the table of docs/rewards.md from BUILTIN: `python -m tools.docs.rewards docs/rewards.md`."""

import inspect
import sys
from pathlib import Path

from tiercel.rewards.registry import BUILTIN
from tools.docs.recipe import Say, options_of
from tools.docs.tables import write_table

TABLE = "built-in rewards"  # its name in the document


def table(say: Say = str) -> str:
    """Return a table with a row for every built-in reward. `say` translates texts."""
    head = ("name", "what it takes as the answer", "value", "options", "right from")
    lines = [f"| {' | '.join(map(say, head))} |", "|---|---|---|---|---|"]
    for name, kind in BUILTIN.items():
        value = say((inspect.getdoc(kind) or "").replace("\n", " ")).replace("|", "\\|")
        needs = say("; needs the package {0}").format(kind.needs) if kind.needs else ""
        options = ", ".join(f"`{option}`" for option in options_of(name) if option != "correct_at") or "-"
        right = "-" if kind.own_right_from is None else f"{kind.own_right_from:g}"
        lines.append(f"| `{name}` | {say(kind.reads)} | {value}{needs} | {options} | {right} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_table(Path(sys.argv[1]), TABLE, table())
