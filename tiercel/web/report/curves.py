"""The curves of a run, from its metrics: a chart for each number that carries information."""

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import accumulate, chain
from operator import itemgetter

from tiercel.tables import table_rows
from tiercel.web.report.charts import Chart, Series
from tiercel.web.report.reading import RecordedRun

PHASES = ("rollout", "reward", "advantages", "record", "learn", "sync")
_MOST_AREAS = 120  # stretches of a stacked chart


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
    steps, phases = run.series("time/step"), _phases(run)
    if not steps:
        return None
    if not phases or len(steps) < 2:
        return _chart(run, "Seconds per step", "time/step", "seconds", from_zero=True)
    size = -(-len(steps) // _MOST_AREAS)
    stretches = [steps[start : start + size] for start in range(0, len(steps), size)]
    totals = [statistics.fmean(value for _, value in part) for part in stretches]
    layers = {
        name: [statistics.fmean(seconds.get(step, 0.0) for step, _ in part) for part in stretches]
        for name, seconds in phases.items()
    }
    rest = [max(0.0, total - sum(parts)) for total, *parts in zip(totals, *layers.values(), strict=True)]
    if max(rest) > 0.01 * max(totals):
        layers[_OTHER] = rest
    at = [part[-1][0] for part in stretches]
    series = (
        Series(label=name, points=tuple(zip(at, layer, strict=True)), colour=colour)
        for colour, (name, layer) in enumerate(layers.items())
    )
    return Chart(title="Seconds per step", series=tuple(series), is_layered=True)


def _phases(run: RecordedRun) -> dict[str, dict[int, float]]:
    """Return the seconds of each phase that the run records, by step."""
    found = {name: dict(run.series(f"time/{name}")) for name in PHASES}
    return {name: seconds for name, seconds in found.items() if any(seconds.values())}


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
    newest, slowest = taken[: -_STEPS_SHOWN - 1 : -1], nlargest(_STEPS_SHOWN // 2, taken, key=itemgetter(1))
    phases = {name: found for name, found in _phases(run).items() if any(found.get(step) for step, _ in newest)}
    scale = _BAR / max(1e-9, *(seconds for _, seconds in [*newest, *slowest]))

    def step_time(step: int, seconds: float) -> StepTime:
        parts = [found.get(step, 0.0) for found in phases.values()]
        parts.append(max(0.0, seconds - sum(parts)))
        starts = accumulate(parts, initial=0.0)
        bars = tuple((start * scale, max(0.0, part * scale - 1)) for start, part in zip(starts, parts, strict=False))
        return StepTime(step=step, seconds=seconds, parts=tuple(parts), bars=bars)

    tables = {"Newest steps": newest, "Slowest steps": slowest}
    return Times(
        names=(*phases, _OTHER),
        tables={title: [step_time(*each) for each in steps] for title, steps in tables.items()},
    )
