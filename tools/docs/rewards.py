"""Make the table of docs/rewards.md from BUILTIN: `python -m tools.docs.rewards docs/rewards.md`."""

import sys
from pathlib import Path

from tiercel.config.reward_rules import REWARD_OPTIONS
from tiercel.rewards.builtin import BUILTIN
from tools.docs.tables import write_table

NAME = "built-in rewards"


def table() -> str:
    """List every built-in reward in a row."""
    lines = ["| name | what it takes as the answer | value | options | right from |", "|---|---|---|---|---|"]
    for name, each in BUILTIN.items():
        options = ", ".join(f"`{option}`" for option in REWARD_OPTIONS[name] if option != "correct_at") or "-"
        right = "-" if each.correct_at is None else f"{each.correct_at:g}"
        needs = f"; needs the package {each.needs}" if each.needs else ""
        lines.append(f"| `{name}` | {each.answer} | {each.value}{needs} | {options} | {right} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_table(Path(sys.argv[1]), NAME, table())
