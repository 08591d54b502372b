"""Runs side by side: each number of all of them in one chart, and what differs in their recipes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from tiercel.config.yaml_text import leaves
from tiercel.web.report.charts import Chart, Series
from tiercel.web.report.curves import charts_of
from tiercel.web.report.reading import RecordedRun
from tiercel.web.report.templates import drawn
from tiercel.web.report.verdict import headline

MOST_RUNS = 8  # as many as there are colours
_EXPECTED = ("output",)  # differs between any two runs


def compare_part(runs: Sequence[tuple[str, RecordedRun]]) -> Markup:
    """Show up to MOST_RUNS runs, given with their names."""
    return drawn(
        "compare.html",
        names=[name for name, _ in runs],
        verdicts=[headline(run).replace("->", "→") for _, run in runs],
        shown=shared_charts(runs),
        recipes=differing(compared_recipes([run for _, run in runs])),
        environments=differing([flat(run.environment) for _, run in runs]),
    )


def shared_charts(runs: Sequence[tuple[str, RecordedRun]]) -> list[Chart]:
    """Return the charts of all runs, those with the same title as one: a colour for each run."""
    merged: dict[str, Chart] = {}
    for number, (name, run) in enumerate(runs):
        for chart in charts_of(run):
            series = tuple(_of_run(each, number, name) for each in chart.series)
            before = merged.get(chart.title, replace(chart, series=()))
            last_step = max(before.last_step, chart.last_step)
            merged[chart.title] = replace(before, series=before.series + series, last_step=last_step)
    return list(merged.values())


def _of_run(series: Series, number: int, name: str) -> Series:
    return replace(series, colour=number, label=f"{name}, held out" if series.style == "points" else name)


def flat(value: Any) -> dict[str, Any]:
    """Return the leaves of nested mappings and lists by their keys, joined by points."""
    return {path: each for path, each in leaves(value, in_lists=True) if path}


def differing(values: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return what is not the same everywhere: the value of each, None if it has none, by key in the order of keys."""
    keys = dict.fromkeys(key for each in values for key in each)
    found = {key: [each.get(key) for each in values] for key in keys}
    return {key: each for key, each in found.items() if any(value != each[0] for value in each)}


def compared_recipes(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Return the leaves of the runs' recipes, without what differs between any two."""
    return [flat({key: value for key, value in run.recipe.items() if key not in _EXPECTED}) for run in runs]
