"""The result of a run in one line, and its plain problems."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tiercel.message_text import counted
from tiercel.web.report.metrics import Row
from tiercel.web.report.numbers import WINDOW, ends, pair, share, short
from tiercel.web.report.reading import RecordedRun

HELD_OUT = {  # label by key, the most important first
    "eval/accuracy": "held-out accuracy",
    "eval/reward/mean": "held-out reward",
    "eval/loss": "held-out loss",
}
TITLES = {"reward": "Reward model", "distill": "Distillation"}  # of verbs that are not written in capitals
_OF_TRAINING = {"grpo": ("sampled reward", "reward/mean"), "distill": ("KL from the teacher", "teacher/kl")}

_MANY_MASKED = 0.02
_MANY_TRUNCATED = 0.5
_MANY_FLAT = 0.8
_LOW_ENTROPY = 0.1  # of the first value
_OVERFIT = 0.02  # held-out loss above its lowest, relative


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricChange:
    """A number at the start and at the end of a run; `after` is None if there is only one."""

    label: str
    before: str
    after: str | None
    before_note: str
    after_note: str
    note: str = ""

    @property
    def text(self) -> str:
        """Return the change as plain text."""
        before = f"{self.label} {self.before}{_parenthesis(self.before_note)}"
        after = "" if self.after is None else f" -> {self.after}{_parenthesis(self.after_note)}"
        return before + after + _parenthesis(self.note)


@dataclass(frozen=True, kw_only=True, slots=True)
class Notice:
    """A problem of the run, or a note on it."""

    level: Literal["warning", "note"]
    text: str


def warning(text: str) -> Notice:
    return Notice(level="warning", text=text)


def note(text: str) -> Notice:
    return Notice(level="note", text=text)


def progress(run: RecordedRun) -> str:
    """Return "400 steps", or "60 of 400 steps" for a run that is not at its end."""
    total = run.total_steps
    if total is None or run.last_step >= total:
        return counted(run.last_step, "step")
    return f"{run.last_step:,} of {counted(total, 'step')}"


def headline(run: RecordedRun) -> str:
    """Return the verdict as one line of text."""
    found = changes(run)
    said = "; ".join(change.text for change in found) if found else "nothing recorded yet"
    return f"{TITLES.get(run.kind, run.kind.upper())}, {progress(run)}: {said}"


def changes(run: RecordedRun) -> list[MetricChange]:
    """Return the numbers of the verdict, the most important first: the held-out score, then the one of training."""
    return [*_held_out(run), *_ends(run, *_OF_TRAINING.get(run.kind, ("training loss", "loss")))]


def _held_out(run: RecordedRun) -> Iterator[MetricChange]:
    key = next((key for key in HELD_OUT if run.series(key)), None)
    if key is None:
        return
    rows = run.metrics.having(key)
    first, last = rows[0], rows[-1]
    evaluations = [first] if first is last else [first, last]
    notes = [counted(int(last["eval/count"]), "row")] if "eval/count" in last else []
    intervals = [_interval(row) for row in evaluations] if "accuracy" in key else []
    if intervals and all(intervals):
        notes.append(f"95 % interval{'s' if len(intervals) > 1 else ''} {' and '.join(intervals)}")
    before, after = pair(first[key], last[key])
    yield MetricChange(
        label=HELD_OUT[key],
        before=before,
        after=None if first is last else after,
        before_note="" if first["step"] == 0 and first is not last else _when(first["step"]),
        after_note="" if last["step"] == run.last_step else _when(last["step"]),
        note="; ".join(notes),
    )


def _when(step: int) -> str:
    return "before training" if step == 0 else f"step {step:,}"


def _interval(row: Row) -> str:
    low, high = row.get("eval/accuracy_low"), row.get("eval/accuracy_high")
    return "" if low is None or high is None else " to ".join(pair(low, high))


def _ends(run: RecordedRun, label: str, key: str) -> Iterator[MetricChange]:
    if points := run.series(key):
        first, last, size = ends(points)
        before, after = pair(first, last)
        yield MetricChange(
            label=label,
            before=before,
            after=None if len(points) == 1 else after,
            before_note=f"first {size} steps" if size > 1 else f"step {points[0][0]}",
            after_note=f"last {size}" if size > 1 else f"step {points[-1][0]}",
        )


def _parenthesis(note: str) -> str:
    return f" ({note})" if note else ""


def notices(run: RecordedRun) -> list[Notice]:
    """List the problems of a run but `unfinished`, from its metrics and its rejected rows; warnings first."""
    found = [*_reward_notices(run), *_learning_notices(run), *_held_out_notices(run)]
    found += map(warning, run.problems)
    if run.bad_rows:
        found.append(warning(f"{counted(len(run.bad_rows), 'row')} of the data could not be used; see Rejected rows."))
    for name, count in run.unreadable.items():
        lost = f"Left out of {name}: {counted(count, 'line')}"
        found.append(note(f"{lost} that cannot be read, most likely cut off by a crash."))
    return sorted(found, key=lambda notice: notice.level == "note")


def unfinished(run: RecordedRun) -> Iterator[Notice]:
    """Yield a warning if a run is not at its end."""
    total = run.total_steps
    if total is not None and run.last_step < total:
        yield warning(f"The run is not at its end: {run.last_step:,} of {counted(total, 'step')} are done.")


def _reward_notices(run: RecordedRun) -> Iterator[Notice]:
    sampled = completions_sampled(run)
    masked = int(sum(value for _, value in run.series("reward/masked")))
    if sampled and masked / sampled > _MANY_MASKED:
        environment = any(value for _, value in run.series("environment/failed"))
        at_fault = "a reward or the environment" if environment else "a reward"
        yield warning(
            f"{masked:,} of {sampled:,} sampled completions ({share(masked / sampled)}) were masked: {at_fault} "
            "failed, or no reward applied. They taught nothing."
        )
    elif masked:
        yield note(f"{counted(masked, 'sampled completion')} had no usable reward and so gave no gradient.")
    recent, over = _recent(run, "group/zero_std_fraction")
    if recent and min(value for _, value in run.series("group/zero_std_fraction")) == 1:
        yield warning("In no group did the rewards differ, so no step could teach anything.")
    elif recent > _MANY_FLAT:
        yield warning(
            f"{over} {share(recent)} of the groups had equal rewards and so gave no gradient: the task is too easy or "
            "too hard by now."
        )


def _learning_notices(run: RecordedRun) -> Iterator[Notice]:
    """Yield what the table of findings, which reads the metrics step by step, does not say."""
    cut, over = _recent(run, "completion/truncated_fraction")
    if cut > _MANY_TRUNCATED:
        yield warning(f"{over} {share(cut)} of the completions were truncated{_truncated_at(run)}.")
    if skipped := int(sum(value for _, value in run.series("loss_scale/skipped"))):
        yield note(f"{counted(skipped, 'update')} of float16 overflowed and changed no weights.")
    entropy = run.series("entropy/mean")
    if run.kind == "grpo" and len(entropy) > 1:
        first, last, _ = ends(entropy)
        if 0 < last < _LOW_ENTROPY * first:
            yield note(f"Entropy fell from {short(first)} to {short(last)}: there is little left to explore.")


def _truncated_at(run: RecordedRun) -> str:
    """Name the limits that end completions, with their values if the recipe has them."""
    has_turns = bool(run.series("turns/mean"))
    keys = ("max_turns", "max_trajectory_tokens", "max_new_tokens") if has_turns else ("max_new_tokens",)
    limits = {key: run.setting("rollout", key) for key in keys}
    named = ", ".join(f"rollout.{key} = {limit}" for key, limit in limits.items() if isinstance(limit, int))
    if has_turns:
        return f": their turns or their tokens ran out ({named or 'rollout.max_turns, rollout.max_trajectory_tokens'})"
    return f" at {named}" if named else ""


def _held_out_notices(run: RecordedRun) -> Iterator[Notice]:
    scored = run.metrics.having("eval/accuracy")
    if len(scored) > 1:
        high, low = scored[-1].get("eval/accuracy_high"), scored[0].get("eval/accuracy_low")
        if high is not None and low is not None and high < low:
            yield warning("Held-out accuracy fell, by more than its intervals allow for chance.")
    loss = run.series("eval/loss")
    if len(loss) > 1:
        step, lowest = min(loss, key=lambda point: point[1])
        if loss[-1][1] - lowest > _OVERFIT * abs(lowest):
            yield warning(
                f"Held-out loss was lowest, {short(lowest)}, at step {step:,} and is {short(loss[-1][1])} now: "
                "an earlier checkpoint, or fewer steps, would do better on rows like these."
            )


def completions_sampled(run: RecordedRun) -> int:
    """Return the number of completions of all rollouts: tokens in all divided by tokens on average."""
    means = dict(run.series("completion/tokens_mean"))
    return sum(round(tokens / mean) for step, tokens in run.series("tokens/completion") if (mean := means.get(step)))


def _recent(run: RecordedRun, key: str) -> tuple[float, str]:
    """Return the mean of a metric over the last steps, and in words over which; 0 without any."""
    values = [value for _, value in run.series(key)[-WINDOW:]]
    return statistics.fmean(values) if values else 0.0, f"Over the last {len(values)} steps"
