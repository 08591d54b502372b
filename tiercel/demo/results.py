"""Accuracies by kind of question, from the records of evaluations."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tiercel.demo.running import evaluations_of
from tiercel.runs.directory import read_metrics
from tiercel.runs.records import GroupRecord, groups_path
from tiercel.runs.step_files import lines_of_step
from tiercel.training.evaluation import wilson

Counts = Mapping[str, tuple[int, int]]  # right answers and rows, by the kind of question


def before_after_control(run: Path, control: Path) -> tuple[Counts, Counts, Counts]:
    """Count a run's first and last evaluation, and the control's file. Raises TrainingError if one is missing."""
    steps = [int(row["step"]) for row in evaluations_of(run, read_metrics(run))]
    files = (groups_path(run, "evaluations", steps[0]), groups_path(run, "evaluations", steps[-1]), control)
    before, after, other = (by_kind(read_groups(file)) for file in files)
    return before, after, other


def read_groups(file: Path) -> list[GroupRecord]:
    """Read the groups of held-out rows from a file, which a run compresses after a while."""
    return [GroupRecord.from_json(json.loads(line)) for line in lines_of_step(file)]


def by_kind(groups: Sequence[GroupRecord]) -> Counts:
    """Count the right answers and the rows of each kind, which the row's id names, and of all kinds."""
    right, rows = Counter[str](), Counter[str]()
    for group in groups:
        for kind in (group.id.split("-")[1], "all"):
            rows[kind] += 1
            right[kind] += bool(group.completions[0].is_correct)
    return {kind: (right[kind], rows[kind]) for kind in rows}


def in_words(counts: Counts, kind: str) -> str:
    """Return an accuracy with its 95 % interval as text."""
    right, count = counts[kind]
    low, high = wilson(right, count)
    return f"{right / count:.3f} ({low:.3f} to {high:.3f})"
