"""Faults of a run that its metrics show so far: from rows of metrics.jsonl to symptoms."""

import math
import re
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

from tiercel.tables import table_rows

FLAT_STEPS = 50
MOST_KEYS = 64  # keys whose numbers are kept; the checks use a dozen
FLAT_SPREAD = 0.01  # of reward/mean from step to step, relative to the size of the rewards
TREND_ERRORS = 2.0  # a trend: the halves of the window differ by more than this many standard errors
EQUAL_STEPS = 10
EQUAL_FRACTION = 0.95  # of the groups
TRUNCATED_STEPS = 5
TRUNCATED_FRACTION = 0.95  # of the completions
FORMAT_STEPS = 10
STILL_STEPS = 5
FAILED_STEPS = 3
FAILED_FRACTION = 0.5  # of the completions, and of the tool calls
ENTROPY_STEPS = 3
ENTROPY_SHARE = 0.05  # of the first value
GAP_STEPS = 3
GAP_SIZE = 0.1  # of a logprob
FIRST_STEPS = 1000  # entropy and gap have a number in these, if they ever have one
QUIET_STEPS = 50  # without a fault, after which it is reported again

_FORMAT_MEAN = re.compile(r"reward/format(_\d+)?/mean")
_ENTROPY, _GAP = "entropy/mean", "sampler/logprob_gap_mean"

MetricsRow = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Symptom:
    """A fault that the metrics show. `key` is its kind, and `recipe_key` is the key to look at first."""

    key: str
    step: int
    text: str
    cause: str
    recipe_key: str

    @property
    def line(self) -> str:
        """Return the line for the log."""
        return f"warning at step {self.step}: {self.text} Likely cause: {self.cause}. Look at {self.recipe_key}."


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The last rows of a run, at least one, and the first number that the run had under each of some keys."""

    rows: Sequence[MetricsRow]
    first: Mapping[str, float]
    numbers: dict[str, deque[float | None]]  # of the rows, by key, for the keys that were requested

    def last(self, key: str, count: int) -> list[float]:
        """Return the numbers of the last `count` rows, or an empty list if a row has no number or there are too few
        rows."""
        if key not in self.numbers:
            self.numbers[key] = deque((_number(row, key) for row in self.rows), maxlen=FLAT_STEPS)
        values = list(self.numbers[key])[-count:]
        return [] if len(values) < count or None in values else values  # type: ignore[return-value]

    def symptom(self, key: str, *numbers: object, form: str = "") -> Symptom:
        """Build a symptom of the last row, in the words of the table."""
        text, cause, recipe_key = _forms()[f"{key},{form}".rstrip(",")]
        step = self.rows[-1]["step"]
        return Symptom(key=key, step=step, text=text.format(*numbers), cause=cause, recipe_key=recipe_key)


@cache
def _forms() -> Mapping[str, list[str]]:
    return {form: rest for form, *rest in table_rows("tiercel.reliability", "symptoms.txt")}


class Diagnosis:
    """Reads the rows of a run in order and reports new symptoms. A symptom counts as new again after QUIET_STEPS steps
    without it."""

    def __init__(self, rows: Sequence[MetricsRow] = ()):
        """Start with the rows that the run already has; their symptoms are known. If there are many, only the first and
        the last are read: no check looks further back, and no symptom is remembered for longer."""
        self._rows: deque[MetricsRow] = deque(maxlen=FLAT_STEPS)
        self._first: dict[str, float] = {}
        self._last_seen: dict[str, int] = {}
        self._numbers: dict[str, deque[float | None]] = {}
        for row in islice(rows, FIRST_STEPS):
            self._note_first(row)
        for row in rows[-(FLAT_STEPS + QUIET_STEPS + 1) :]:
            self.add(row)

    def _note_first(self, row: MetricsRow) -> None:
        for key in (_ENTROPY, _GAP):
            if _number(row, "grad_norm") is not None and (value := _number(row, key)) is not None:
                self._first.setdefault(key, value)

    def add(self, row: MetricsRow) -> tuple[Symptom, ...]:
        """Return the symptoms that this row is the first to show. A row without an update, such as row 0, has none."""
        if _number(row, "grad_norm") is None:
            return ()
        self._rows.append(row)
        self._note_first(row)
        if len(self._numbers) > MOST_KEYS:
            self._numbers.clear()
        for key, values in self._numbers.items():
            values.append(_number(row, key))
        window = Window(rows=list(self._rows), first=self._first, numbers=self._numbers)
        held = [found for check in CHECKS for found in check(window)]
        new = [found for found in held if found.step - self._last_seen.get(found.key, -math.inf) > QUIET_STEPS]
        self._last_seen |= {found.key: found.step for found in held}
        return tuple(new)


def symptoms(rows: Iterable[MetricsRow]) -> tuple[Symptom, ...]:
    """Return all symptoms of a run's rows in order."""
    diagnosis = Diagnosis()
    return tuple(found for row in rows for found in diagnosis.add(row))


def _flat_reward(window: Window) -> Iterator[Symptom]:
    means, equal = window.last("reward/mean", FLAT_STEPS), window.last("group/zero_std_fraction", FLAT_STEPS)
    spreads = window.last("reward/std", FLAT_STEPS)
    if not (means and equal and spreads) or statistics.fmean(equal) >= EQUAL_FRACTION:
        return
    middle = statistics.fmean(means)
    deviation = math.sqrt(statistics.fmean([(value - middle) ** 2 for value in means]))
    half = FLAT_STEPS // 2
    rise = statistics.fmean(means[half:]) - statistics.fmean(means[:half])
    has_trend = abs(rise) > TREND_ERRORS * deviation * math.sqrt(2 / half)
    if not has_trend and deviation <= FLAT_SPREAD * max(abs(middle), statistics.fmean(spreads)):
        yield window.symptom("flat reward", FLAT_STEPS, f"{middle:.4g}", f"{deviation:.2g}")


def _equal_rewards(window: Window) -> Iterator[Symptom]:
    values = window.last("group/zero_std_fraction", EQUAL_STEPS)
    if not values or min(values) < EQUAL_FRACTION:
        return
    is_one = len(set(window.last("reward/mean", EQUAL_STEPS))) == 1 and not any(window.last("reward/std", EQUAL_STEPS))
    yield window.symptom("equal rewards", EQUAL_STEPS, _percent(values), form="value" if is_one else "")


def _all_truncated(window: Window) -> Iterator[Symptom]:
    values = window.last("completion/truncated_fraction", TRUNCATED_STEPS)
    if values and min(values) >= TRUNCATED_FRACTION:
        form = "turns" if "turns/mean" in window.rows[-1] else ""
        yield window.symptom("truncated", TRUNCATED_STEPS, _percent(values), form=form)


def _failures(window: Window) -> Iterator[Symptom]:
    for kind, key in (("failed rewards", "reward/failed_fraction"), ("failed calls", "tools/failed_fraction")):
        values = window.last(key, FAILED_STEPS)
        if values and min(values) > FAILED_FRACTION:
            yield window.symptom(kind, FAILED_STEPS, _percent(values))


def _no_reward(window: Window) -> Iterator[Symptom]:
    row = window.rows[-1]
    if _number(row, "reward/masked") and _number(row, "reward/failed_fraction") == 0 and "reward/mean" not in row:
        yield window.symptom("no reward")


def _format_never_met(window: Window) -> Iterator[Symptom]:
    keys = [key for key in window.rows[-1] if key.startswith("reward/format") and _FORMAT_MEAN.fullmatch(key)]
    means = [window.last(key, FORMAT_STEPS) for key in keys]
    if any(values and not any(values) for values in means):
        yield window.symptom("format", FORMAT_STEPS)


def _no_gradient(window: Window) -> Iterator[Symptom]:
    """Find gradients of exactly 0. An update that overflowed in float16 or was left out also has a norm of 0, but is
    reported elsewhere."""
    norms = window.last("grad_norm", STILL_STEPS)
    if not norms or any(norms):
        return
    overflowed = any(_number(row, "loss_scale/skipped") for row in window.rows[-STILL_STEPS:])
    left_out = {_number(row, "update/left_out") for row in window.rows[-STILL_STEPS - 1 :]}  # a total up to each row
    if overflowed or len(left_out) > 1:
        return
    is_grpo = _number(window.rows[-1], "reward/failed_fraction") is not None
    equal = window.last("group/zero_std_fraction", STILL_STEPS)
    form = "unusable" if is_grpo and not equal else "equal" if equal and min(equal) == 1 else ""
    yield window.symptom("no gradient", STILL_STEPS, form=form)


def _entropy_collapse(window: Window) -> Iterator[Symptom]:
    """Find a policy whose samples hardly differ. In SFT a low entropy is intended, so only GRPO is checked."""
    values, first = window.last(_ENTROPY, ENTROPY_STEPS), window.first.get(_ENTROPY, 0.0)
    if values and max(values) < ENTROPY_SHARE * first and "reward/failed_fraction" in window.rows[-1]:
        yield window.symptom("entropy", f"{first:.3g}", f"{values[-1]:.3g}")


def _logprob_gap(window: Window) -> Iterator[Symptom]:
    values = window.last(_GAP, GAP_STEPS)
    if values and min(values) > GAP_SIZE:
        yield window.symptom("logprob gap", f"{values[-1]:.3g}", f"{window.first[_GAP]:.3g}")


CHECKS: tuple[Callable[[Window], Iterator[Symptom]], ...] = (
    _failures,
    _no_reward,
    _all_truncated,
    _format_never_met,
    _equal_rewards,
    _no_gradient,
    _flat_reward,
    _entropy_collapse,
    _logprob_gap,
)


def _number(row: MetricsRow, key: str) -> float | None:
    """Return the value if it is a finite number, else None."""
    value: Any = row.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and abs(value) < math.inf else None


def _percent(values: Sequence[float]) -> str:
    return f"{100 * statistics.fmean(values):.0f} %"
