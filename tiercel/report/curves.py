"""The curves of a run, from its metrics: a chart for each number that carries information."""

import statistics
from collections.abc import Iterator
from dataclasses import replace

from tiercel.report.charts import Chart, Series, line_chart, smoothing, stacked_chart
from tiercel.report.markup import Html, element
from tiercel.report.reading import Run
from tiercel.runs.group_records import finite

PHASES = {"time/rollout": "rollout", "time/reward": "reward", "time/learn": "learn", "time/sync": "sync"}
_MOST_AREAS = 120  # stretches of a stacked chart
_OF_TURNS = (
    " A turn is what the policy writes before a tool or the environment answers. Tokens that came back are read, not "
    "learnt from. A failed tool call was answered with an error."
)


def curves_section(run: Run) -> Html:
    """Draw every chart that has data, and explain its lines."""
    charts = [line_chart(chart) for chart in charts_of(run)]
    if (time := _time_chart(run)) is not None:
        charts.append(time)
    if not charts:
        return element("section", element("h2", "Curves"), element("p", "No step is recorded yet."), id="curves")
    size = smoothing(run.last_step)
    thick = f"thin: each step; thick: mean of it and the {size - 1} before" if size > 1 else "a point for each step"
    said = [f"Over optimiser steps; {thick}. Dots: held-out rows; whiskers: 95 % interval."]
    if run.series("turns/mean"):
        said.append(_OF_TURNS)
    return element(
        "section",
        element("h2", "Curves"),
        element("p", said, class_="aside"),
        element("div", charts, class_="charts"),
        id="curves",
    )


def charts_of(run: Run) -> list[Chart]:
    """Return line charts in reading order: score, rewards, loss, then the health of the run."""
    drawn = [*_score_charts(run), *_health_charts(run)]
    return [replace(chart, last_step=run.last_step) for chart in drawn if chart.series]


def _score_charts(run: Run) -> Iterator[Chart]:
    yield _accuracy(run)
    total = _every_step(run, "sampled", "reward/mean")
    yield _chart("Reward", total, _held_out(run, "eval/reward/mean"))
    rewards = {
        key.removeprefix("reward/").removesuffix("/mean"): key for key in run.metric_names() if _is_single_reward(key)
    }
    for name, key in rewards.items():
        if run.series(key) != run.series("reward/mean"):
            held_out = _held_out(run, f"eval/{key}")
            yield _chart(f"Reward {name}", _every_step(run, "sampled", key), held_out)
    yield _chart("Pairs told apart, fraction", _every_step(run, "training", "pairs/accuracy"), from_zero=True)
    yield _chart("Margin of pairs", _every_step(run, "training", "pairs/margin"), _held_out(run, "eval/margin"))
    for side in ("desirable", "undesirable"):
        yield _chart(f"Reward of {side} answers", _every_step(run, "training", f"labels/reward_{side}"))
    yield _chart("Loss", _every_step(run, "training", "loss"), _held_out(run, "eval/loss"))


def _health_charts(run: Run) -> Iterator[Chart]:
    from_zero = {
        "grad_norm": "Gradient norm",
        "entropy/mean": "Entropy per token",
        "completion/tokens_mean": "Completion tokens",
        "completion/truncated_fraction": "Truncated, fraction",
        "turns/mean": "Turns per completion",
        "tokens/observed": "Tokens that came back",
        **{key: f"Calls of {key.split('/')[1]}" for key in run.metric_names() if _is_tool_calls(key)},
        "group/zero_std_fraction": "Equal-reward groups, fraction",
        "sampler/logprob_gap_mean": "Sampler's logprob gap",
    }
    for key, title in from_zero.items():
        yield _chart(title, _every_step(run, "this run", key), from_zero=True)
    unless_zero = {
        "kl/mean": "KL from the reference",
        "labels/kl": "KL from the reference",
        "teacher/kl": "KL from the teacher",
        "clip/low_fraction": "Ratios clipped below, fraction",
        "clip/high_fraction": "Ratios clipped above, fraction",
        "tools/failed_fraction": "Failed tool calls, fraction",
        "environment/failed": "Trajectories whose environment failed",
        "reward/masked": "Masked completions",
        "group/dropped": "Dropped groups",
        "rows/rejected": "Rejected rows",
    }
    for key, title in unless_zero.items():
        if any(value != 0 for _, value in run.series(key)):
            yield _chart(title, _every_step(run, "this run", key), from_zero=True)
    if len({value for _, value in run.series("lr")}) > 1:
        yield _chart("Learning rate", _every_step(run, "learning rate", "lr"), from_zero=True)


def _accuracy(run: Run) -> Chart:
    rows = [
        (row["step"], finite(row.get("eval/accuracy_low")), finite(row.get("eval/accuracy_high")))
        for row in run.metrics
    ]
    whiskers = tuple((step, low, high) for step, low, high in rows if low is not None and high is not None)
    points = tuple(run.series("eval/accuracy"))
    held_out = Series(label="held out", points=points, style="points", whiskers=whiskers) if points else None
    return _chart("Held-out accuracy", held_out, from_zero=True)


def _chart(title: str, *series: Series | None, from_zero: bool = False) -> Chart:
    """Make a chart of the series that exist."""
    return Chart(title=title, series=tuple(each for each in series if each is not None), from_zero=from_zero)


def _every_step(run: Run, label: str, key: str) -> Series | None:
    points = tuple(run.series(key))
    return Series(label=label, points=points) if points else None


def _held_out(run: Run, key: str) -> Series | None:
    points = tuple(run.series(key))
    return Series(label="held out", points=points, style="points", colour=1) if points else None


def _is_single_reward(key: str) -> bool:
    return key.startswith("reward/") and key.endswith("/mean") and key.count("/") >= 2


def _is_tool_calls(key: str) -> bool:
    return key.startswith("tools/") and key.endswith("/calls")


def _time_chart(run: Run) -> Html | None:
    """Draw the seconds of a step, by phase where the run records them; time outside all phases is "other"."""
    rows = [row for row in run.metrics if finite(row.get("time/step")) is not None]
    keys = [key for key in PHASES if any(finite(row.get(key)) for row in rows)]
    if not rows:
        return None
    if not keys or len(rows) < 2:
        points = tuple(run.series("time/step"))
        chart = Chart(title="Seconds per step", series=(Series(label="seconds", points=points),), from_zero=True)
        return line_chart(chart)
    size = -(-len(rows) // _MOST_AREAS)
    stretches = [rows[start : start + size] for start in range(0, len(rows), size)]
    layers = [[statistics.fmean(finite(row.get(key)) or 0.0 for row in part) for part in stretches] for key in keys]
    totals = [statistics.fmean(row["time/step"] for row in part) for part in stretches]
    rest = [max(0.0, total - sum(parts)) for total, *parts in zip(totals, *layers, strict=True)]
    labels = [PHASES[key] for key in keys]
    if max(rest) > 0.01 * max(totals):
        layers, labels = [*layers, rest], [*labels, "other"]
    return stacked_chart("Seconds per step", labels, [part[-1]["step"] for part in stretches], layers)
