"""Reading a run directory for the report. Lines that a crash cut short are left out and counted."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
    _series: dict[str, list[tuple[int, float]]] = field(default_factory=dict, init=False, repr=False, compare=False)

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
        if key not in self._series:
            known = [(row["step"], value) for row in self.metrics if (value := row.get(key)) is not None]
            self._series[key] = [(step, value) for step, given in known if (value := finite(given)) is not None]
        return self._series[key]

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
        metrics, bad_rows = (parsed_lines(_text(path / name)) for name in ("metrics.jsonl", "bad_rows.jsonl"))
        return assembled(path, metrics, bad_rows, tuple(_text(path / "log.txt").splitlines()))
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error}") from error


def assembled(path: Path, metrics: Sequence[Any], bad_rows: Sequence[Any], log: tuple[str, ...]) -> Run:
    """Make a run of the values of its lines, None for a line that is no JSON, and of its small files. Raises OSError
    where these cannot be read."""
    config_text = _text(path / "config.yaml")
    by_step = {row["step"]: row for row in metrics if isinstance(row, dict) and type(row.get("step")) is int}
    numbered = sum(isinstance(row, dict) and type(row.get("step")) is int for row in metrics)
    bad = tuple(row for row in bad_rows if isinstance(row, dict))
    counts = {"metrics.jsonl": len(metrics) - numbered, "bad_rows.jsonl": len(bad_rows) - len(bad)}
    rows = tuple(by_step[step] for step in sorted(by_step))
    return Run(
        path=path,
        kind=_kind(config_text, rows),
        config_text=config_text,
        recipe=_mapping(yaml.safe_load, config_text),
        environment=_mapping(json.loads, _text(path / "env.json")),
        metrics=rows,
        bad_rows=bad,
        log=log,
        rollout_steps=steps_of(path / "rollouts"),
        evaluation_steps=steps_of(path / "evaluations"),
        unreadable={name: count for name, count in counts.items() if count},
    )


def read_groups(run: Run, folder: Folder, step: int) -> GroupFile:
    """Read the completions of one step. Raises RunError where the file cannot be read."""
    return group_file(groups_path(run.path, folder, step), step)


def group_file(file: Path, step: int) -> GroupFile:
    """Read a file of rollouts/ or evaluations/. Raises RunError where it cannot be read."""
    try:
        records = parsed_lines(_text(file))
    except OSError as error:
        raise RunError(f"{file}: cannot be read: {error}") from error
    groups: list[GroupRecord] = []
    unreadable = 0
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


def steps_of(folder: Path) -> tuple[int, ...]:
    """Return the steps that rollouts/ or evaluations/ has a file of, in order."""
    names = os.listdir(folder) if folder.is_dir() else []
    return tuple(sorted(int(match[1]) for name in names if (match := _STEP_FILE.fullmatch(name))))


def _text(file: Path) -> str:
    return redact(file.read_text(encoding="utf-8", errors="replace")) if file.exists() else ""


def parsed_lines(text: str) -> list[Any]:
    """Return the values of lines of JSON without secrets; None for a line that cannot be read."""
    is_clean = redact(text) == text
    lines = [line for line in text.split("\n") if line.strip()]
    if is_clean:
        with suppress(ValueError, RecursionError):
            values: list[Any] = json.loads(f"[{','.join(lines)}]")  # all values share their keys: half the memory
            if len(values) == len(lines):
                return values
    return [_parsed(line, is_clean) for line in lines]


def _parsed(line: str, is_clean: bool) -> Any:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if is_clean or redact(line) == line else redact_values(value)
