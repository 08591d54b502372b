"""All kinds of reward; docs/rewards.md has the table of the built-in ones, which
`python -m tiercel.rewards.builtin docs/rewards.md` writes there."""

import inspect
import sys
from pathlib import Path

from tiercel.documents import write_table
from tiercel.rewards.entry import Entry
from tiercel.rewards.grounding import GROUNDING
from tiercel.rewards.shape import SHAPE
from tiercel.rewards.started import STARTED, ByCall
from tiercel.rewards.wording import WORDING

KINDS: tuple[type[Entry], ...] = (*WORDING, *GROUNDING, *SHAPE, *STARTED)
CALL = "call"
BY_NAME: dict[str, type[Entry]] = {kind.model_fields["name"].default or CALL: kind for kind in KINDS}
BUILTIN = {name: kind for name, kind in BY_NAME.items() if kind is not ByCall}
TELLS_RIGHT = tuple(name for name, kind in BUILTIN.items() if kind.own_right_from is not None)
OF_EVERY_REWARD = tuple(Entry.model_fields)
OPTIONS = tuple(dict.fromkeys(key for kind in KINDS for key in kind.model_fields if key not in OF_EVERY_REWARD))
NAME = "built-in rewards"


def options_of(name: str) -> tuple[str, ...]:
    """List the keys that a reward takes beside those of every reward, its own first; `name` may be "call"."""
    keys = [key for key in OPTIONS if key in BY_NAME[name].model_fields and key != CALL]
    return tuple(sorted(keys, key=("answer_column", "correct_at").__contains__))


def takers(option: str) -> tuple[str, ...]:
    """List the rewards that take a key."""
    return tuple(name for name, kind in BY_NAME.items() if option in kind.model_fields)


def table() -> str:
    """Write the built-in rewards as docs/rewards.md lists them."""
    lines = ["| name | what it takes as the answer | value | options | right from |", "|---|---|---|---|---|"]
    for name, kind in BUILTIN.items():
        value = (inspect.getdoc(kind) or "").replace("\n", " ").replace("|", "\\|")
        needs = f"; needs the package {kind.needs}" if kind.needs else ""
        options = ", ".join(f"`{option}`" for option in options_of(name) if option != "correct_at") or "-"
        right = "-" if kind.own_right_from is None else f"{kind.own_right_from:g}"
        lines.append(f"| `{name}` | {kind.reads} | {value}{needs} | {options} | {right} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    write_table(Path(sys.argv[1]), NAME, table())
