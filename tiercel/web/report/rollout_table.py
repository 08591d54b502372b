"""A step's rollouts as text, for a terminal and for Python's prompt."""

from pathlib import Path

from tiercel.errors import RunError
from tiercel.runs.recipe import is_run, not_a_run
from tiercel.runs.records import CompletionRecord, GroupRecord, groups_path
from tiercel.runs.step_files import steps_of
from tiercel.web.report.reading import group_file
from tiercel.writing import reading

WIDTH = 100  # characters of a question or a completion


class StepRollouts(tuple[GroupRecord, ...]):
    """A step's prompts with their completions, rewards and advantages. Printed, it is a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n\n".join(map(_group, self)) or "no rollouts"


def rollouts_of(run: Path, step: int | None = None) -> StepRollouts:
    """Read the rollouts of a step, by default the newest; none if that step has none. Raises RunError if the file
    cannot be read."""
    known = steps_of(run / "rollouts")
    wanted = step if step is not None else known[-1] if known else None
    if wanted is None or wanted not in known:
        return StepRollouts()
    return StepRollouts(group_file(groups_path(run, "rollouts", wanted), wanted).groups)


def require_rollouts(run: Path, step: int | None) -> None:
    """Raise RunError, with the steps that there are, if a run has no rollouts of a step."""
    if not is_run(run):
        raise not_a_run(run)
    with reading(run):
        known = steps_of(run / "rollouts")
    if not known:
        raise RunError(f"{run} has no rollouts; a method that samples nothing has none")
    if step is not None and step not in known:
        raise RunError(f"--step: {step} has no rollouts in {run}; it has steps {known[0]} to {known[-1]}")


def _group(group: GroupRecord) -> str:
    """Format a prompt and its completions, the best first."""
    lines = [f"{_line(group.id)}: {_line(group.question)}"]
    lines += [f"  image: {_line(image.path or image.sha256)}" for image in group.images]
    lines += [f"  answer: {_line(str(group.answer))}"] if group.answer is not None else []
    lines.append(f"  {'reward':>8} {'advantage':>9} {'tokens':>6}  completion")
    ordered = sorted(group.completions, key=lambda each: -float("inf") if each.total is None else each.total)
    return "\n".join([*lines, *map(_completion, reversed(ordered))])


def _completion(one: CompletionRecord) -> str:
    total = "masked" if one.total is None else f"{one.total:.3f}"
    advantage = "-" if one.advantage is None else f"{one.advantage:+.2f}"
    ending = " (truncated)" if one.is_truncated else ""
    return f"  {total:>8} {advantage:>9} {one.tokens:6}  {_line(one.text)}{ending}"


def _line(text: str) -> str:
    """Return text as one line of at most WIDTH characters, without control characters, which may come from a model."""
    text = "".join(each if each.isprintable() else " " for each in text)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 30]} ... {text[-25:]}"
