"""`tiercel runs`: the runs of a folder, with what stopped each; or some of them side by side."""

import json
import sys
import time
from argparse import Namespace

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from tiercel.cli.comparison import print_comparison
from tiercel.plurals import counted
from tiercel.report.listing import Entry, listed
from tiercel.report.numbers import NOTHING, duration
from tiercel.runs.ending import State
from tiercel.shortening import brief

STYLES: dict[State, str] = {
    "running": "bold cyan",
    "done": "green",
    "stopped": "yellow",
    "stalled": "bold red",
    "failed": "bold red",
    "killed": "red",
}
HEADS = ("run", "verb", "state", "step", "held-out", "training", "lr", "changed")
RIGHT = 3  # the column whose numbers end at one line
_LONGEST_REASON = 160  # characters


def run(recipe: None, arguments: Namespace) -> None:
    """Print the list, or the comparison. Raises RunError where a folder or a run is not there."""
    if arguments.compare:
        print_comparison(arguments.compare, as_json=arguments.json)
        return
    entries = listed(arguments.folders)
    if arguments.json:
        print(json.dumps([entry.as_json() for entry in entries], indent=1))
        return
    console = Console(highlight=False, soft_wrap=True)
    if not entries:
        folders = ", ".join(map(str, arguments.folders))
        console.print(f"no run below {folders}; `tiercel runs FOLDER` looks elsewhere", markup=False)
        return
    rows = [_cells(entry, time.time()) for entry in entries]
    widths = [max(map(cell_len, column)) for column in zip(HEADS, *rows, strict=True)]
    console.print(Text(_line(HEADS, widths), style="dim"))
    for entry, row in zip(entries, rows, strict=True):
        line = Text(_line(row, widths))
        start = sum(widths[:2]) + 4
        line.stylize(STYLES[entry.state], start, start + len(entry.state))
        console.print(line)
        if entry.reason:
            console.print(Text(f"    {_first_line(entry.reason)}", style="dim" if sys.stdout.isatty() else ""))
    console.print(_summary(entries))


def _cells(entry: Entry, now: float) -> tuple[str, ...]:
    step = f"{entry.step:,}" + ("" if entry.steps is None else f" of {entry.steps:,}")
    score = NOTHING if entry.score is None else entry.score.text
    age = f"{duration(max(0.0, now - entry.changed))} ago"
    training = NOTHING if entry.training is None else entry.training.text
    rate = NOTHING if entry.learning_rate is None else f"{entry.learning_rate:g}"
    return (entry.path, entry.kind or NOTHING, entry.state, step, score, training, rate, age)


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    padded = []
    for number, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        space = " " * (width - cell_len(cell))
        padded.append(space + cell if number == RIGHT else cell + space)
    return "  ".join(padded).rstrip()


def _first_line(reason: str) -> str:
    line, *_ = [*reason.strip().splitlines(), ""]
    return brief(line, _LONGEST_REASON)


def _summary(entries: list[Entry]) -> str:
    counts = [(state, sum(entry.state == state for entry in entries)) for state in STYLES]
    return f"{counted(len(entries), 'run')}: " + ", ".join(f"{count} {state}" for state, count in counts if count)
