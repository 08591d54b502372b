"""The curves of a run, from its metrics: a chart for each number that carries information."""

import re
import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from tiercel.web.report.charts import Chart, Series, smoothing
from tiercel.web.report.reading import RecordedRun

PHASES = {"time/rollout": "rollout", "time/reward": "reward", "time/learn": "learn", "time/sync": "sync"}
_SINGLE_REWARD, _TOOL_CALLS = re.compile("reward/(.*)/mean"), re.compile("tools/.*/calls")
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
    """Yield line charts in reading order: score, rewards, loss, then the health of the run. So only one of them needs
    its points at a time."""
    for chart in chain([_accuracy(run)], _score_charts(run), _health_charts(run)):
        if chart.series:
            yield replace(chart, last_step=run.last_step)


def _score_charts(run: RecordedRun) -> Iterator[Chart]:
    yield _chart(run, "Reward", "reward/mean", "sampled", "eval/reward/mean")
    for key in run.metric_names():
        reward = _SINGLE_REWARD.fullmatch(key)
        if reward is not None and run.series(key) != run.series("reward/mean"):
            yield _chart(run, f"Reward {reward[1]}", key, "sampled", f"eval/{key}")
    yield _chart(run, "Pairs told apart, fraction", "pairs/accuracy", "training", from_zero=True)
    yield _chart(run, "Margin of pairs", "pairs/margin", "training", "eval/margin")
    for side in ("desirable", "undesirable"):
        yield _chart(run, f"Reward of {side} answers", f"labels/reward_{side}", "training")
    yield _chart(run, "Loss", "loss", "training", "eval/loss")


def _health_charts(run: RecordedRun) -> Iterator[Chart]:
    calls = {key: f"Calls of {key.split('/')[1]}" for key in run.metric_names() if _TOOL_CALLS.fullmatch(key)}
    always = {
        "grad_norm": "Gradient norm",
        "entropy/mean": "Entropy per token",
        "completion/tokens_mean": "Completion tokens",
        "completion/truncated_fraction": "Truncated, fraction",
        "turns/mean": "Turns per completion",
        "tokens/observed": "Tokens that came back",
        "branches/reached_fraction": "Completions that forked, fraction",
        **calls,
        "group/zero_std_fraction": "Equal-reward groups, fraction",
        "sampler/logprob_gap_mean": "Sampler's logprob gap",
    }
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
    for key, title in (always | unless_zero).items():
        if key in always or any(value != 0 for _, value in run.series(key)):
            yield _chart(run, title, key, from_zero=True)
    if len({value for _, value in run.series("lr")}) > 1:
        yield _chart(run, "Learning rate", "lr", "learning rate", from_zero=True)


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
