"""Line charts and stacked areas as inline SVG. The classes of the style sheet give the colours."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import Literal

from tiercel.web.report.markup import Html, aside, element, fragment, legend
from tiercel.web.report.numbers import Point, ends, nice_ticks, short, thinned, tick_labels, trailing_means

WIDTH, HEIGHT = 380, 200
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 8, 24

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
    has_ends: bool = True  # the first series' first and last value stand beside the title


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """The mapping from steps and values to places in the picture."""

    steps: tuple[float, float]
    values: tuple[float, float]

    def x(self, step: float) -> float:
        low, high = self.steps
        return LEFT + (step - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.values
        return TOP + (high - min(max(value, low), high)) / (high - low) * (HEIGHT - TOP - BOTTOM)


def line_chart(chart: Chart) -> Html:
    """Draw the chart as a <figure>: title, first and last value, picture, legend."""
    values = [value for series in chart.series for _, value in series.points]
    values += [value for series in chart.series for _, low, high in series.whiskers for value in (low, high)]
    low, high, beyond = _value_range(values, chart.from_zero)
    ticks = nice_ticks(low, high, 4)
    frame = Frame(steps=_step_range(chart.series, chart.last_step), values=(ticks[0], ticks[-1]))
    drawn = [_drawn(series, frame) for series in chart.series]
    colours = [(_swatch(series), series.label) for series in chart.series]
    note = f"{beyond} beyond the axis, up to {short(max(values))}" if beyond else None
    return element(
        "figure",
        _caption(chart.title, chart.series[0] if chart.has_ends else None),
        _svg(chart.title, frame, ticks, drawn, _hover(chart.series)),
        legend(colours) if len(colours) > 1 else None,
        aside(note),
        class_="chart",
    )


def stacked_chart(title: str, labels: Sequence[str], steps: Sequence[int], layers: Sequence[Sequence[float]]) -> Html:
    """Draw layers on top of one another, the first at the bottom. Each layer has a value at every step."""

    def series_of(label: str, values: Iterable[float]) -> Series:
        return Series(label=label, points=tuple(zip(steps, values, strict=True)))

    tops = list(accumulate(layers, lambda below, layer: list(map(add, below, layer))))
    ticks = nice_ticks(0.0, max(tops[-1]) or 1.0, 4)
    total = series_of("total", tops[-1])
    frame = Frame(steps=_step_range([total]), values=(ticks[0], ticks[-1]))
    areas = [
        element("path", d=_area(series_of(labels[number], top).points, frame), class_=f"area c{number}")
        for number, top in enumerate(tops)
    ]
    return element(
        "figure",
        _caption(title, total),
        _svg(title, frame, ticks, areas[::-1], _hover(list(map(series_of, labels, layers)))),
        legend((f"swatch area c{number}", label) for number, label in enumerate(labels)),
        class_="chart",
    )


def _caption(title: str, series: Series | None) -> Html:
    name, readout = element("span", title, class_="title"), element("output", class_="readout")
    if series is None:
        return element("figcaption", name, readout)
    points = series.points
    first, last, size = ends(points)
    hint = f"mean of the first {size} and of the last {size} steps"
    if series.style == "points" or size == 1:
        first, last, hint = points[0][1], points[-1][1], "first and last"
    text = short(last) if len(points) == 1 else f"{short(first)} → {short(last)}"
    return element(
        "figcaption",
        name,
        element("span", text, class_="value", title=hint),
        readout,
    )


def _svg(title: str, frame: Frame, ticks: Sequence[float], drawn: Sequence[Html], hover: str) -> Html:
    lines: list[Html] = []
    for tick, label in zip(ticks, tick_labels(ticks), strict=True):
        y = frame.y(tick)
        lines.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="zero" if label == "0" else "grid"))
        lines.append(element("text", label, x=LEFT - 6, y=y + 3.5, text_anchor="end"))
    for step in _step_ticks(frame):
        x = frame.x(step)
        lines.append(element("line", x1=x, x2=x, y1=HEIGHT - BOTTOM, y2=HEIGHT - BOTTOM + 4, class_="tick"))
        anchor = "end" if x > WIDTH - RIGHT - 12 else "middle"
        lines.append(element("text", f"{step:,}", x=min(x, WIDTH - 2.0), y=HEIGHT - 7, text_anchor=anchor))
    lines.append(element("text", "step", x=2, y=HEIGHT - 7))
    return element(
        "svg",
        element("title", title),
        lines,
        *drawn,
        element("line", class_="cursor", x1=0, x2=0, y1=TOP, y2=HEIGHT - BOTTOM, visibility="hidden"),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        data_hover=hover,
        data_steps=json.dumps([*frame.steps, LEFT, WIDTH - RIGHT]),
    )


def _drawn(series: Series, frame: Frame) -> Html:
    colour = f"c{series.colour}"
    if series.style == "every_step":
        return _every_step(series, frame, colour)
    points = thinned(series.points, _MOST_POINTS)
    line, drawn = element("path", d=_path(points, frame), class_=f"thin {colour}"), {step for step, _ in points}
    whiskers = [
        element("path", d=_whisker(frame.x(step), frame.y(low), frame.y(high)), class_=f"whisker {colour}")
        for step, low, high in series.whiskers
        if step in drawn
    ]
    said = [element("title", f"step {step:,}: {short(value)}") for step, value in points]
    dots = [_dot(point, frame, colour, title) for point, title in zip(points, said, strict=True)]
    return fragment(line, whiskers, dots)


def _dot(point: Point, frame: Frame, colour: str, title: Html | None = None) -> Html:
    return element("circle", title, cx=frame.x(point[0]), cy=frame.y(point[1]), r=3, class_=f"dot {colour}")


def _every_step(series: Series, frame: Frame, colour: str) -> Html:
    if len(series.points) == 1:
        return _dot(series.points[0], frame, colour)
    raw = _path(thinned(series.points, _MOST_POINTS), frame)
    size = smoothing(len(series.points))
    if size == 1:
        return element("path", d=raw, class_=f"thick {colour}")
    smooth = _path(thinned(trailing_means(series.points, size), _MOST_POINTS), frame)
    return fragment(element("path", d=raw, class_=f"raw {colour}"), element("path", d=smooth, class_=f"thick {colour}"))


def smoothing(count: int) -> int:
    """Return the number of steps that the thick line averages over; 1 means no averaging."""
    return 1 if count < _FEWEST_TO_SMOOTH else max(3, count // _SMOOTHED_SHARE)


def _path(points: Sequence[Point], frame: Frame) -> str:
    return "M" + "L".join(f"{frame.x(step):.1f} {frame.y(value):.1f}" for step, value in points)


def _area(points: Sequence[Point], frame: Frame) -> str:
    floor = frame.y(0.0)
    return f"{_path(points, frame)}L{frame.x(points[-1][0]):.1f} {floor:.1f}L{frame.x(points[0][0]):.1f} {floor:.1f}Z"


def _whisker(x: float, low: float, high: float) -> str:
    return f"M{x:.1f} {low:.1f}V{high:.1f}M{x - 3:.1f} {low:.1f}h6M{x - 3:.1f} {high:.1f}h6"


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


def _step_range(series: Sequence[Series], last_step: int = 0) -> tuple[float, float]:
    steps = [step for each in series for step, _ in each.points]
    low, high = min(steps), max([last_step, *steps])
    low = 0 if low <= high / 10 else low
    return (low, high) if high > low else (low - 1, high + 1)


def _step_ticks(frame: Frame) -> list[int]:
    low, high = frame.steps
    ticks = nice_ticks(low, high, 5)
    return [int(tick) for tick in ticks if low <= tick <= high and tick == int(tick)]


def _swatch(series: Series) -> str:
    return f"swatch {'round' if series.style == 'points' else 'flat'} c{series.colour}"


def _hover(series: Sequence[Series]) -> str:
    """Return the values that the script shows under the pointer, as JSON."""
    shown = [
        {"l": each.label, "p": [[step, float(f"{value:.4g}")] for step, value in thinned(each.points, _MOST_POINTS)]}
        for each in series
    ]
    return json.dumps(shown, separators=(",", ":"), ensure_ascii=False)
