"""The curves of a run, from its metrics: a chart for each number that carries information."""

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import chain
from operator import itemgetter
from typing import Any

from tiercel.runs.records import finite
from tiercel.tables import table_rows
from tiercel.web.report.charts import Chart, Series, smoothing
from tiercel.web.report.reading import RecordedRun

PHASES = {f"time/{name}": name for name in ("rollout", "reward", "advantages", "record", "learn", "sync")}
_MOST_AREAS = 120  # stretches of a stacked chart
_OF_TURNS = (
    " A turn is what the policy writes before a tool or the environment answers. Tokens that came back are read, not "
    "learnt from. A failed tool call was answered with an error."
)


def curves_note(run: RecordedRun) -> str:
    """Explain the lines of the charts."""
    size = smoothing(run.last_step)
    thick = f"thin: each step; thick: mean of it and the {size - 1} before" if size > 1 else "a point for each step"
    said = f"Over optimiser steps; {thick}. Dots: held-out rows; whiskers: 95 % interval."
    return said + (_OF_TURNS if run.series("turns/mean") else "")


def charts_of(run: RecordedRun) -> Iterator[Chart]:
    """Yield line charts in reading order: score, rewards, loss, then the health of the run. Only one of them needs its
    points at a time."""
    for chart in chain([_accuracy(run)], _charts(run)):
        if chart.series:
            yield replace(chart, last_step=run.last_step)


def _charts(run: RecordedRun) -> Iterator[Chart]:
    """Yield the charts of the table."""
    for pattern, title, label, held_out, how in table_rows("tiercel.web.report", "charts.txt"):
        named = re.compile(re.escape(pattern).replace(r"\*", "(.*)"))
        keys = [key for key in run.metrics.names() if named.fullmatch(key)] if "*" in pattern else [pattern]
        for key in keys:
            if "unless" not in how or not _is_needless(run, key, how):
                name = named.sub(r"\1", key) if "*" in pattern else ""
                texts = (each.replace("*", name) for each in (title, key, label, held_out))
                yield _chart(run, *texts, from_zero="0" in how)


def _is_needless(run: RecordedRun, key: str, how: str) -> bool:
    """Return whether a metric is what its chart must not be."""
    points = run.series(key)
    if "total" in how:
        return points == run.series("reward/mean")
    return not any(value for _, value in points) if "zero" in how else len({value for _, value in points}) < 2


def _accuracy(run: RecordedRun) -> Chart:
    low, high = dict(run.series("eval/accuracy_low")), run.series("eval/accuracy_high")
    whiskers = tuple((step, low[step], value) for step, value in high if step in low)
    points = tuple(run.series("eval/accuracy"))
    series = Series(label="held out", points=points, style="points", whiskers=whiskers)
    return Chart(title="Held-out accuracy", series=(series,) if points else (), from_zero=True)


def _chart(
    run: RecordedRun, title: str, key: str, label: str = "this run", held_out: str = "", *, from_zero: bool = False
) -> Chart:
    """Make a chart of a metric of training, and of one of held-out rows, if they have numbers."""
    training = Series(label=label, points=tuple(run.series(key)))
    held = Series(label="held out", points=tuple(run.series(held_out)), style="points", colour=1)
    return Chart(title=title, series=tuple(each for each in (training, held) if each.points), from_zero=from_zero)


def time_chart(run: RecordedRun) -> Chart | None:
    """Return the seconds of a step, by phase if the run records them; time outside all phases is "other"."""
    steps = run.series("time/step")
    phases = {key: found for key in PHASES if any((found := dict(run.series(key))).values())}
    if not steps:
        return None
    if not phases or len(steps) < 2:
        return _chart(run, "Seconds per step", "time/step", "seconds", from_zero=True)
    size = -(-len(steps) // _MOST_AREAS)
    stretches = [steps[start : start + size] for start in range(0, len(steps), size)]
    layers = [
        [statistics.fmean(found.get(step, 0.0) for step, _ in part) for part in stretches] for found in phases.values()
    ]
    totals = [statistics.fmean(value for _, value in part) for part in stretches]
    rest = [max(0.0, total - sum(parts)) for total, *parts in zip(totals, *layers, strict=True)]
    labels = [PHASES[key] for key in phases]
    if max(rest) > 0.01 * max(totals):
        layers, labels = [*layers, rest], [*labels, "other"]
    at = [part[-1][0] for part in stretches]
    series = [
        Series(label=label, points=tuple(zip(at, layer, strict=True)), colour=colour)
        for colour, (label, layer) in enumerate(zip(labels, layers, strict=True))
    ]
    return Chart(title="Seconds per step", series=tuple(series), is_layered=True)


_STEPS_SHOWN = 12
_BAR = 600  # pixels of the bar of a step's time
_OTHER = "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """The time of a step, and the seconds of its phases, in the order of their names."""

    step: int
    seconds: float
    parts: tuple[float, ...]
    bars: tuple[tuple[float, float], ...]  # start and width of each part


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Steps of a run; the bars of all have the same scale."""

    names: tuple[str, ...]
    tables: Mapping[str, Sequence[StepTime]]  # by title


def times_of(run: RecordedRun) -> Times | None:
    """Return the newest and the slowest steps; None if none is timed."""
    taken = run.series("time/step")
    if not taken:
        return None
    newest = [run.metrics.of_step(step) for step, _ in taken[: -_STEPS_SHOWN - 1 : -1]]
    slowest = [run.metrics.of_step(step) for step, _ in nlargest(_STEPS_SHOWN // 2, taken, key=itemgetter(1))]
    keys = [key for key in PHASES if any(finite(row.get(key)) for row in newest)]
    longest = max(row["time/step"] for row in [*newest, *slowest])
    return Times(
        names=(*(PHASES[key] for key in keys), _OTHER),
        tables={
            "Newest steps": [_step_time(row, keys, longest) for row in newest],
            "Slowest steps": [_step_time(row, keys, longest) for row in slowest],
        },
    )


def _step_time(row: Mapping[str, Any], keys: Sequence[str], longest: float) -> StepTime:
    parts = [finite(row.get(key)) or 0.0 for key in keys]
    parts.append(max(0.0, row["time/step"] - sum(parts)))
    bars, start = [], 0.0
    for value in parts:
        width = value / longest * _BAR if longest else 0.0
        bars.append((start, max(0.0, width - 1)))
        start += width
    return StepTime(step=row["step"], seconds=row["time/step"], parts=tuple(parts), bars=tuple(bars))
