"""Where the time of steps went: the newest and the slowest, by phase."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from operator import itemgetter
from typing import Any

from tiercel.runs.records import finite
from tiercel.web.report.curves import PHASES
from tiercel.web.report.reading import RecordedRun

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
