"""`tiercel runs --compare`: what the page of several runs shows, as text."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from tiercel.errors import RunError
from tiercel.report.numbers import NOTHING, ends, short
from tiercel.report.reading import Run, read_run
from tiercel.report.verdict import headline
from tiercel.shortening import brief
from tiercel.view.compare import MOST_RUNS, compared_recipes, differing, flat, shared_charts

_LONGEST_VALUE = 60  # characters
Row = tuple[str, ...]


def print_comparison(paths: Sequence[Path], *, as_json: bool) -> None:
    """Print the verdicts of runs, what differs in their recipes and environments, and their numbers. Raises RunError
    where one is no run, and where there are fewer than two or too many."""
    if not 2 <= len(paths) <= MOST_RUNS:
        raise RunError(f"--compare: {len(paths)} given; name from 2 to {MOST_RUNS} runs")
    runs = [read_run(path) for path in paths]
    names = list(map(str, paths))
    recipes = _different(compared_recipes(runs))
    environments = _different([flat(run.environment) for run in runs])
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


def newest_numbers(runs: Sequence[Run]) -> dict[str, list[float | None]]:
    """Return the newest value of each curve of the page, of each run: of training the mean of its last steps, of
    held-out rows the last evaluation."""
    found: dict[str, list[float | None]] = {}
    for chart in shared_charts([(str(number), run) for number, run in enumerate(runs)]):
        for series in chart.series:
            is_held_out = series.style == "points"
            title = f"{chart.title}, held out" if is_held_out else chart.title
            values = found.setdefault(title, [None] * len(runs))
            values[series.colour] = series.points[-1][1] if is_held_out else ends(series.points)[1]
    return found


def _different(values: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {key: [each.get(key) for each in values] for key in differing(values)}


def _in_words(value: Any) -> str:
    return NOTHING if value is None else brief(str(value), _LONGEST_VALUE)


def _print_table(console: Console, heads: Row, rows: Sequence[Row]) -> None:
    console.print()
    if not rows:
        console.print(Text(f"{heads[0]}: nothing"))
        return
    widths = [max(map(cell_len, column)) for column in zip(heads, *rows, strict=True)]
    for number, row in enumerate([heads, *rows]):
        padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True))
        console.print(Text("  ".join(padded).rstrip(), style="dim" if number == 0 else ""))
