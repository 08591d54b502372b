"""`tiercel runs`: list the runs of a folder with what stopped each, or compare some of them side by side."""

import json
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from tiercel.errors import RunError
from tiercel.message_text import brief, counted
from tiercel.runs.ending import State
from tiercel.web.report.listing import ListedRun, listed
from tiercel.web.report.numbers import NOTHING, duration, ends, short
from tiercel.web.report.reading import RecordedRun, read_run
from tiercel.web.report.verdict import headline
from tiercel.web.view.compare import MOST_RUNS, compared_recipes, differing, flat, shared_charts

_LONGEST_VALUE = 60  # characters
Row = tuple[str, ...]


def print_comparison(paths: Sequence[Path], *, as_json: bool) -> None:
    """Print the verdicts of runs, the differences between their recipes and environments, and their numbers. Raises
    RunError if a path is not a run, or if there are fewer than two or too many."""
    if not 2 <= len(paths) <= MOST_RUNS:
        raise RunError(f"--compare: got {len(paths)} runs, but needs from 2 to {MOST_RUNS}")
    runs = [read_run(path) for path in paths]
    names = list(map(str, paths))
    recipes = differing(compared_recipes(runs))
    environments = differing([flat(run.environment) for run in runs])
    numbers = newest_numbers(runs)
    verdicts = list(map(headline, runs))
    if as_json:
        found = {"runs": names, "verdicts": verdicts, "recipe": recipes, "environment": environments, "newest": numbers}
        print(json.dumps(found, indent=1))
        return
    console = Console(highlight=False, soft_wrap=True)
    for name, verdict in zip(names, verdicts, strict=True):
        console.print(Text(f"{name}: {verdict}"))
    for title, values in (("recipe", recipes), ("environment", environments)):
        rows = [(key, *map(_in_words, each)) for key, each in values.items()]
        _print_table(console, (f"what differs in the {title}", *names), rows)
    rows = [(title, *(NOTHING if value is None else short(value) for value in each)) for title, each in numbers.items()]
    _print_table(console, ("newest (mean of the last steps)", *names), rows)


def newest_numbers(runs: Sequence[RecordedRun]) -> dict[str, list[float | None]]:
    """Return the newest value of each of the page's curves for each run: the mean of the last steps for training, the
    last evaluation for held-out rows."""
    found: dict[str, list[float | None]] = {}
    for chart in shared_charts([(str(number), run) for number, run in enumerate(runs)]):
        for series in chart.series:
            is_held_out = series.style == "points"
            title = f"{chart.title}, held out" if is_held_out else chart.title
            values = found.setdefault(title, [None] * len(runs))
            values[series.colour] = series.points[-1][1] if is_held_out else ends(series.points)[1]
    return found


def _in_words(value: Any) -> str:
    return NOTHING if value is None else brief(str(value), _LONGEST_VALUE)


def _print_table(console: Console, heads: Row, rows: Sequence[Row]) -> None:
    console.print()
    if not rows:
        console.print(Text(f"{heads[0]}: nothing"))
        return
    for number, line in enumerate(_aligned([heads, *rows])):
        console.print(Text(line, style="" if number else "dim"))


def _aligned(rows: Sequence[Row], right: int | None = None) -> list[str]:
    """Return rows as lines with their cells one beneath another; `right` is a column aligned to the right."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        spaced = [(cell, " " * (width - cell_len(cell))) for cell, width in zip(row, widths, strict=True)]
        cells = (space + cell if place == right else cell + space for place, (cell, space) in enumerate(spaced))
        lines.append("  ".join(cells).rstrip())
    return lines


STYLES: dict[State, str] = {
    "running": "bold cyan",
    "done": "green",
    "stopped": "yellow",
    "stalled": "bold red",
    "failed": "bold red",
    "killed": "red",
}
HEADS = ("run", "verb", "state", "step", "held-out", "training", "lr", "changed")
RIGHT = 3  # the column whose numbers are aligned to the right
_LONGEST_REASON = 160  # characters


def run(recipe: None, arguments: Namespace) -> None:
    """Print the list or the comparison. Raises RunError if a folder or a run does not exist."""
    if arguments.compare:
        print_comparison(arguments.compare, as_json=arguments.json)
        return
    entries = listed(arguments.folders)
    if arguments.json:
        print(json.dumps([asdict(entry) for entry in entries], indent=1))
        return
    console = Console(highlight=False, soft_wrap=True)
    if not entries:
        folders = ", ".join(map(str, arguments.folders))
        console.print(f"no run below {folders}; `tiercel runs FOLDER` looks elsewhere", markup=False)
        return
    heads, *lines = _aligned([HEADS, *(_cells(entry, time.time()) for entry in entries)], RIGHT)
    console.print(Text(heads, style="dim"))
    for entry, text in zip(entries, lines, strict=True):
        line, start = Text(text), heads.index("state")
        line.stylize(STYLES[entry.state], start, start + len(entry.state))
        console.print(line)
        if entry.reason:
            first_line = entry.reason.strip().partition("\n")[0]
            console.print(Text(f"    {brief(first_line, _LONGEST_REASON)}", style="dim" if sys.stdout.isatty() else ""))
    console.print(_summary(entries))


def _cells(entry: ListedRun, now: float) -> Row:
    step = f"{entry.step:,}" + ("" if entry.steps is None else f" of {entry.steps:,}")
    score = NOTHING if entry.score is None else entry.score.text
    age = f"{duration(max(0.0, now - entry.changed))} ago"
    training = NOTHING if entry.training is None else entry.training.text
    rate = NOTHING if entry.learning_rate is None else f"{entry.learning_rate:g}"
    return (entry.path, entry.kind or NOTHING, entry.state, step, score, training, rate, age)


def _summary(entries: list[ListedRun]) -> str:
    counts = [(state, sum(entry.state == state for entry in entries)) for state in STYLES]
    return f"{counted(len(entries), 'run')}: " + ", ".join(f"{count} {state}" for state, count in counts if count)
