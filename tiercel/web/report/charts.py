"""Charts over optimiser steps, as the numbers that the page's script draws: of a long run few, that look the same."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tiercel.web.report.numbers import Point, ends, short, thinned, trailing_means

_MOST_POINTS = 300
_FEWEST_TO_SMOOTH = 10
_SMOOTHED_SHARE = 20  # the window is one twentieth of the run
_OUTLIER = 4  # times the span of all but the most extreme hundredth


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """A line. `every_step`: a thin line under its trailing mean; `points`: points with whiskers from low to high."""

    label: str
    points: tuple[Point, ...]
    style: Literal["every_step", "points"] = "every_step"
    whiskers: tuple[tuple[int, float, float], ...] = ()  # step, low, high
    colour: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A small chart over optimiser steps."""

    title: str
    series: tuple[Series, ...]
    from_zero: bool = False
    last_step: int = 0  # of all the charts beside it
    is_layered: bool = False  # the series lie on one another; each has a value at every step

    @property
    def totals(self) -> tuple[Point, ...]:
        """Return the points that the numbers beside the title are of."""
        if not self.is_layered:
            return self.series[0].points
        columns = zip(*(series.points for series in self.series), strict=True)
        return tuple((column[0][0], sum(value for _, value in column)) for column in columns)


def first_and_last(chart: Chart) -> tuple[str, str]:
    """Return the text beside the title, and what its numbers are."""
    points = chart.totals
    first, last, size = ends(points)
    hint = f"mean of the first {size} and of the last {size} steps"
    if chart.series[0].style == "points" or size == 1:
        first, last, hint = points[0][1], points[-1][1], "first and last"
    return short(last) if len(points) == 1 else f"{short(first)} → {short(last)}", hint


def beyond_note(chart: Chart) -> str:
    """Say how many values lie above the axis."""
    values = _values(chart)
    _, _, beyond = _value_range(values, chart.from_zero)
    return f"{beyond} beyond the axis, up to {short(max(values))}" if beyond else ""


def chart_json(chart: Chart) -> str:
    """Return what the script draws, as JSON."""
    return json.dumps(chart_numbers(chart), separators=(",", ":"), ensure_ascii=False)


def chart_numbers(chart: Chart) -> dict[str, Any]:
    """Return what the script draws."""
    low, high, _ = _value_range(_values(chart), chart.from_zero)
    return {
        "steps": _step_range(chart),
        "values": [low, high],
        "layered": chart.is_layered,
        "series": [_series_numbers(series, chart.is_layered) for series in chart.series],
    }


def _series_numbers(series: Series, is_layer: bool) -> dict[str, Any]:
    points = thinned(series.points, _MOST_POINTS)
    known = {"label": series.label, "style": series.style, "colour": series.colour, "points": _rounded(points)}
    if series.style == "points":
        drawn = {step for step, _ in points}
        return {**known, "whiskers": _rounded(each for each in series.whiskers if each[0] in drawn)}
    size = smoothing(len(series.points))
    if size == 1 or is_layer:
        return known
    return {**known, "mean": _rounded(thinned(trailing_means(series.points, size), _MOST_POINTS))}


def _rounded(points: Iterable[tuple[float, ...]]) -> list[list[float]]:
    return [[step, *(float(f"{value:.6g}") for value in values)] for step, *values in points]


def smoothing(count: int) -> int:
    """Return the number of steps that the thick line averages over; 1 means no averaging."""
    return 1 if count < _FEWEST_TO_SMOOTH else max(3, count // _SMOOTHED_SHARE)


def _values(chart: Chart) -> list[float]:
    if chart.is_layered:
        return [0.0, *(value for _, value in chart.totals)]
    values = [value for series in chart.series for _, value in series.points]
    return values + [value for series in chart.series for _, *both in series.whiskers for value in both]


def _value_range(values: Sequence[float], from_zero: bool) -> tuple[float, float, int]:
    """Return the lowest and the highest value of the axis, and how many values lie above it: a few spikes must not
    flatten the rest."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    beyond = 0
    ordinary = ordered[(len(ordered) - 1) * 99 // 100]
    if len(ordered) >= 20 and high - low > _OUTLIER * (ordinary - low) > 0:
        high = ordinary + 0.1 * (ordinary - low)
        beyond = sum(value > high for value in ordered)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low < 1e-9 * max(abs(high), abs(low), 1e-9):
        margin = abs(high) * 0.5
        low, high = (low - margin, high + margin) if margin else (0.0, 1.0)
    return low, high, beyond


def _step_range(chart: Chart) -> tuple[float, float]:
    steps = [step for series in chart.series for step, _ in series.points]
    low, high = min(steps), max([chart.last_step, *steps])
    low = 0 if low <= high / 10 else low
    return (low, high) if high > low else (low - 1, high + 1)
