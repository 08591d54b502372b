"""Reading a run directory. Lines that a crash cut short are left out and counted."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tiercel.config.yaml_text import MOST_BYTES
from tiercel.errors import RunError
from tiercel.message_text import brief
from tiercel.regular_files import LARGEST_JSON, is_linked
from tiercel.reliability.redaction import redact
from tiercel.runs.recipe import is_run, not_a_run
from tiercel.runs.records import Folder, GroupRecord, groups_path
from tiercel.runs.step_files import read_step, steps_of
from tiercel.web.report.files import (
    MetricsTail,
    Tail,
    end_of_log,
    mapping_of,
    parsed_records,
    text_of,
    yaml_value,
)
from tiercel.web.report.metrics import Metrics
from tiercel.writing import reading

FIRST_LINE = re.compile(r"# tiercel ([a-z]+)\s")  # of config.yaml, with the verb
_SHOWN = 80  # characters of a file that is not what the run wrote
T = TypeVar("T")
_LOG_STEPS = re.compile(r"\bstep [0-9]+/([0-9]{1,12})\b|, ([0-9]{1,12}) steps$")


_IDENTITY = "run"  # in env.json, as runs/directory.py writes it: it differs for each run and says nothing to a reader


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFile:
    """The groups of one file of rollouts/ or evaluations/."""

    step: int
    groups: tuple[GroupRecord, ...]
    unreadable: int  # lines
    problem: str = ""  # why the file cannot be read; empty if it can


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """A run directory without its completions, which `read_groups` reads step by step."""

    path: Path
    kind: str  # the verb
    recipe: Mapping[str, Any]
    metrics: Metrics  # by step, each step once
    log: tuple[str, ...]
    config_text: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    bad_rows: tuple[Mapping[str, Any], ...] = ()
    rollout_steps: tuple[int, ...] = ()
    evaluation_steps: tuple[int, ...] = ()
    unreadable: Mapping[str, int] = field(default_factory=dict)  # lines by file name
    problems: tuple[str, ...] = ()  # why other files than metrics.jsonl cannot be read

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def last_step(self) -> int:
        """Return the number of optimiser steps that are recorded."""
        return self.metrics.last_step

    @property
    def total_steps(self) -> int | None:
        """Return the number of steps that the run is to make: from the recipe, or from the log if the recipe gives
        epochs."""
        steps = self.setting("train", "steps")
        if isinstance(steps, int):
            return steps
        own = [line for line in self.log if not line.startswith("  ")]  # and not what a reward printed
        found = [match for line in own if (match := _LOG_STEPS.search(line))]
        return int(found[-1][1] or found[-1][2]) if found else None

    def setting(self, *keys: str) -> Any:
        """Return a value of the recipe; None if there is none."""
        value: Any = self.recipe
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def series(self, key: str) -> list[tuple[int, float]]:
        """Return (step, value) for each row of metrics.jsonl that has a finite number under `key`."""
        return self.metrics.series(key)


def read_run(path: Path) -> RecordedRun:
    """Read everything but completions and images.

    Raises RunError if `path` has no config.yaml, or a file of the run cannot be read at all.
    """
    if not is_run(path):
        raise not_a_run(path)
    with reading(path):
        return RunReader(path, is_over=True).read()


class RunReader:
    """Reads a run directory again and again: of files that grow, only what is new."""

    def __init__(self, path: Path, *, is_over: bool = False) -> None:
        """`is_over`: nobody writes the run, so a last line without a newline was cut off by a crash."""
        self.path = path
        self.cuts = 0  # how often lines of metrics were dropped
        self._metrics = MetricsTail(path / "metrics.jsonl", is_over)
        self._bad_rows = Tail(path / "bad_rows.jsonl", is_over)

    def read(self) -> RecordedRun:
        """Return the run as it is now. Raises OSError if config.yaml or metrics.jsonl cannot be read; of other files
        the run says why they cannot."""
        path, problems = self.path, list[str]()
        self.cuts += self._metrics.refresh()
        noted("bad_rows.jsonl", self._bad_rows.refresh, False, problems)
        log = noted("log.txt", lambda: end_of_log(path / "log.txt"), tuple[str, ...](), problems)
        config_text = text_of(path / "config.yaml", MOST_BYTES)
        environment_text = noted("env.json", lambda: text_of(path / "env.json", LARGEST_JSON), "", problems)
        recipe, environment = mapping_of(yaml_value, config_text), mapping_of(json.loads, environment_text)
        for name, text, value in (("config.yaml", config_text, recipe), ("env.json", environment_text, environment)):
            if value is None:
                problems.append(f"{name} is not what the run wrote: {brief(text, _SHOWN) or 'it is empty'}.")
        linked = [name for name in ("rollouts", "evaluations", "tokens", "images") if is_linked(str(path / name))]
        problems += [f"{name} is a link, which is not followed: what is shown lies inside the run." for name in linked]
        metrics, rows = self._metrics.rows.now(), self._bad_rows.values
        bad_rows = tuple(row for row in rows if isinstance(row, dict))
        counts = {"metrics.jsonl": metrics.unreadable, "bad_rows.jsonl": len(rows) - len(bad_rows)}
        return RecordedRun(
            path=path,
            kind=_kind(config_text, metrics),
            config_text=config_text,
            recipe=recipe or {},
            environment={name: value for name, value in (environment or {}).items() if name != _IDENTITY},
            metrics=metrics,
            bad_rows=bad_rows,
            log=log,
            rollout_steps=steps_of(path / "rollouts"),
            evaluation_steps=steps_of(path / "evaluations"),
            unreadable={name: count for name, count in counts.items() if count},
            problems=tuple(problems),
        )


def noted(name: str, read: Callable[[], T], otherwise: T, problems: list[str]) -> T:
    """Read a file; if it cannot be read, note why and return something else."""
    try:
        return read()
    except OSError as error:
        problems.append(f"{name} cannot be read: {error.strerror or error}.")
        return otherwise


def read_groups(run: RecordedRun, folder: Folder, step: int) -> GroupFile:
    """Read the completions of one step; none, and why, if the file cannot be read."""
    try:
        return group_file(groups_path(run.path, folder, step), step)
    except RunError as error:
        return GroupFile(step=step, groups=(), unreadable=0, problem=str(error))


def group_file(file: Path, step: int) -> GroupFile:
    """Read a file of rollouts/ or evaluations/. Raises RunError if it cannot be read."""
    with reading(file):
        groups, unreadable = parsed_records(redact(read_step(file)), GroupRecord.from_json)
    return GroupFile(step=step, groups=tuple(groups), unreadable=unreadable)


def _kind(config_text: str, metrics: Metrics) -> str:
    if (first := FIRST_LINE.match(config_text)) is not None:
        return first[1]
    return "grpo" if any(key.startswith("reward/") for key in metrics.names()) else "sft"
