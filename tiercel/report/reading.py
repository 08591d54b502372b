"""Reading a run directory for the report. Lines that a crash cut short are left out and counted."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tiercel.errors import RunError
from tiercel.reliability.redaction import redact, redact_values
from tiercel.runs.group_records import Folder, GroupRecord, finite, groups_path

_STEP_FILE = re.compile(r"step-([0-9]{1,12})\.jsonl")
_FIRST_LINE = re.compile(r"# tiercel ([a-z]+)\s")
_LOG_STEPS = re.compile(r"\bstep [0-9]+/([0-9]{1,12})\b|, ([0-9]{1,12}) steps$")


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFile:
    """The groups of one file of rollouts/ or evaluations/."""

    step: int
    groups: tuple[GroupRecord, ...]
    unreadable: int  # lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run directory without its completions, which `read_groups` reads step by step."""

    path: Path
    kind: str  # the verb
    config_text: str
    recipe: Mapping[str, Any]
    environment: Mapping[str, Any]
    metrics: tuple[Mapping[str, Any], ...]  # by step, each step once
    bad_rows: tuple[Mapping[str, Any], ...]
    log: tuple[str, ...]
    rollout_steps: tuple[int, ...]
    evaluation_steps: tuple[int, ...]
    unreadable: Mapping[str, int]  # lines by file name

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def last_step(self) -> int:
        """Return the number of optimiser steps that are recorded."""
        return self.metrics[-1]["step"] if self.metrics else 0

    @property
    def total_steps(self) -> int | None:
        """Return the number of steps that the run is to make: from the recipe, or from the log where the recipe gives
        epochs."""
        steps = self.setting("train", "steps")
        if isinstance(steps, int):
            return steps
        found = [match for line in self.log if (match := _LOG_STEPS.search(line))]
        return int(found[-1][1] or found[-1][2]) if found else None

    def setting(self, *keys: str) -> Any:
        """Return a value of the recipe; None where there is none."""
        value: Any = self.recipe
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def series(self, key: str) -> list[tuple[int, float]]:
        """Return (step, value) for each row of metrics.jsonl that has a finite number under `key`."""
        pairs = [(row["step"], finite(row.get(key))) for row in self.metrics]
        return [(step, value) for step, value in pairs if value is not None]

    def metric_names(self) -> list[str]:
        """Return every key of metrics.jsonl, in order of first appearance."""
        return list(dict.fromkeys(key for row in self.metrics for key in row))


def read_run(path: Path) -> Run:
    """Read everything but completions and images.

    Raises RunError where `path` has no config.yaml, or a file of the run cannot be read at all.
    """
    config = path / "config.yaml"
    if not config.is_file():
        raise RunError(f"{path} is no run: it has no config.yaml")
    try:
        config_text = _text(config)
        metrics, bad_metrics = _json_lines(path / "metrics.jsonl")
        bad_rows, bad_bad_rows = _json_lines(path / "bad_rows.jsonl")
        log = tuple(_text(path / "log.txt").splitlines())
        environment = _mapping(json.loads, _text(path / "env.json"))
        rollout_steps, evaluation_steps = _steps(path / "rollouts"), _steps(path / "evaluations")
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error}") from error
    numbered = [row for row in metrics if type(row.get("step")) is int]
    by_step = {row["step"]: row for row in numbered}
    counts = {"metrics.jsonl": bad_metrics + len(metrics) - len(numbered), "bad_rows.jsonl": bad_bad_rows}
    rows = tuple(by_step[step] for step in sorted(by_step))
    return Run(
        path=path,
        kind=_kind(config_text, rows),
        config_text=config_text,
        recipe=_mapping(yaml.safe_load, config_text),
        environment=environment,
        metrics=rows,
        bad_rows=tuple(bad_rows),
        log=log,
        rollout_steps=rollout_steps,
        evaluation_steps=evaluation_steps,
        unreadable={name: count for name, count in counts.items() if count},
    )


def read_groups(run: Run, folder: Folder, step: int) -> GroupFile:
    """Read the completions of one step. Raises RunError where the file cannot be read."""
    return group_file(groups_path(run.path, folder, step), step)


def group_file(file: Path, step: int) -> GroupFile:
    """Read a file of rollouts/ or evaluations/. Raises RunError where it cannot be read."""
    try:
        records, unreadable = _json_lines(file)
    except OSError as error:
        raise RunError(f"{file}: cannot be read: {error}") from error
    groups: list[GroupRecord] = []
    for record in records:
        try:
            groups.append(GroupRecord.from_json(record))
        except ValueError:
            unreadable += 1
    return GroupFile(step=step, groups=tuple(groups), unreadable=unreadable)


def _kind(config_text: str, metrics: tuple[Mapping[str, Any], ...]) -> str:
    if (first := _FIRST_LINE.match(config_text)) is not None:
        return first[1]
    return "grpo" if any(key.startswith("reward/") for row in metrics for key in row) else "sft"


def _mapping(parse: Callable[[str], Any], text: str) -> dict[str, Any]:
    """Parse a text; an empty mapping where it is none."""
    try:
        value = parse(text)
    except (ValueError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}


def _steps(folder: Path) -> tuple[int, ...]:
    names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    return tuple(sorted(int(match[1]) for name in names if (match := _STEP_FILE.fullmatch(name))))


def _text(file: Path) -> str:
    return redact(file.read_text(encoding="utf-8", errors="replace")) if file.exists() else ""


def _json_lines(file: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the objects of a file, and the number of lines that are none."""
    values = list(_parsed_lines(file))
    objects = [value for value in values if isinstance(value, dict)]
    return objects, len(values) - len(objects)


def _parsed_lines(file: Path) -> Iterator[Any]:
    if not file.exists():
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.strip():
                try:
                    value = json.loads(line)
                    yield value if redact(line) == line else redact_values(value)
                except (ValueError, RecursionError):
                    yield None
