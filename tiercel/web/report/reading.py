"""Reading a run directory for the report. Lines that a crash cut short are left out and counted."""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from tiercel.config.yaml_text import LARGEST_TEXT
from tiercel.errors import RunError
from tiercel.regular_files import LARGEST_FILE, LARGEST_JSON, is_linked, open_regular, read_text
from tiercel.reliability.redaction import redact, redact_values
from tiercel.runs.json_lines import blocks_of_lines
from tiercel.runs.records import Folder, GroupRecord, groups_path
from tiercel.web.report.metrics import GrowingMetrics, Metrics
from tiercel.wording import brief
from tiercel.writing import reading

_STEP_FILE = re.compile(r"step-([0-9]{6,12})\.jsonl")
_FIRST_LINE = re.compile(r"# tiercel ([a-z]+)\s")
_SHORT_YAML = 8192  # characters; a recipe with every key has 5,000
_MOST_BRACKETS = 10_000  # a recipe has dozens
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
    problem: str = ""  # why the file cannot be read; empty where it can


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run directory without its completions, which `read_groups` reads step by step."""

    path: Path
    kind: str  # the verb
    config_text: str
    recipe: Mapping[str, Any]
    environment: Mapping[str, Any]
    metrics: Metrics  # by step, each step once
    bad_rows: tuple[Mapping[str, Any], ...]
    log: tuple[str, ...]
    rollout_steps: tuple[int, ...]
    evaluation_steps: tuple[int, ...]
    unreadable: Mapping[str, int]  # lines by file name
    problems: tuple[str, ...] = ()  # why other files than metrics.jsonl cannot be read

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
        own = [line for line in self.log if not line.startswith("  ")]  # and not what a reward printed
        found = [match for line in own if (match := _LOG_STEPS.search(line))]
        return int(found[-1][1] or found[-1][2]) if found else None

    def setting(self, *keys: str) -> Any:
        """Return a value of the recipe; None where there is none."""
        value: Any = self.recipe
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def series(self, key: str) -> list[tuple[int, float]]:
        """Return (step, value) for each row of metrics.jsonl that has a finite number under `key`."""
        return self.metrics.series(key)

    def metric_names(self) -> list[str]:
        """Return every key of metrics.jsonl, in order of first appearance."""
        return self.metrics.names()


def read_run(path: Path) -> Run:
    """Read everything but completions and images.

    Raises RunError where `path` has no config.yaml, or a file of the run cannot be read at all.
    """
    config = path / "config.yaml"
    if not config.is_file():
        raise RunError(f"{path} is not a run: it has no config.yaml")
    problems: list[str] = []
    with reading(path):
        bad_rows = parsed_lines(noted("bad_rows.jsonl", lambda: _text(path / "bad_rows.jsonl"), "", problems))
        log = noted("log.txt", lambda: _text(path / "log.txt"), "", problems).splitlines()
        return assembled(path, _metrics(path), bad_rows, tuple(log), problems)


def noted(name: str, read: Callable[[], T], otherwise: T, problems: list[str]) -> T:
    """Read a file; where it cannot be read, note why and return something else."""
    try:
        return read()
    except OSError as error:
        problems.append(f"{name} cannot be read: {error.strerror or error}.")
        return otherwise


def assembled(
    path: Path, metrics: Metrics, bad_rows: Sequence[Any], log: tuple[str, ...], problems: Sequence[str] = ()
) -> Run:
    """Make a run of its metrics, of the values of its bad rows, None for a line that is no JSON, and of its small
    files; `problems`: of files that could not be read. Raises OSError where config.yaml cannot be read."""
    config_text, told = _text(path / "config.yaml", LARGEST_TEXT), list(problems)
    environment_text = noted("env.json", lambda: _text(path / "env.json", LARGEST_JSON), "", told)
    recipe, environment = _mapping(_yaml, config_text), _mapping(json.loads, environment_text)
    for name, text, value in (("config.yaml", config_text, recipe), ("env.json", environment_text, environment)):
        if value is None:
            told.append(f"{name} is not what the run wrote: {brief(text, _SHOWN) or 'it is empty'}.")
    linked = [name for name in ("rollouts", "evaluations", "tokens", "images") if is_linked(str(path / name))]
    told += [f"{name} is a link, which is not followed: what is shown lies inside the run." for name in linked]
    bad = tuple(row for row in bad_rows if isinstance(row, dict))
    counts = {"metrics.jsonl": metrics.unreadable, "bad_rows.jsonl": len(bad_rows) - len(bad)}
    return Run(
        path=path,
        kind=_kind(config_text, metrics),
        config_text=config_text,
        recipe=recipe or {},
        environment=_without(_IDENTITY, environment or {}),
        metrics=metrics,
        bad_rows=bad,
        log=log,
        rollout_steps=steps_of(path / "rollouts"),
        evaluation_steps=steps_of(path / "evaluations"),
        unreadable={name: count for name, count in counts.items() if count},
        problems=tuple(told),
    )


def read_groups(run: Run, folder: Folder, step: int) -> GroupFile:
    """Read the completions of one step; none, and why, where the file cannot be read."""
    try:
        return group_file(groups_path(run.path, folder, step), step)
    except RunError as error:
        return GroupFile(step=step, groups=(), unreadable=0, problem=str(error))


def group_file(file: Path, step: int) -> GroupFile:
    """Read a file of rollouts/ or evaluations/. Raises RunError where it cannot be read."""
    with reading(file):
        records = parsed_lines(_text(file))
    groups: list[GroupRecord] = []
    unreadable = 0
    for record in records:
        try:
            groups.append(GroupRecord.from_json(record))
        except ValueError:
            unreadable += 1
    return GroupFile(step=step, groups=tuple(groups), unreadable=unreadable)


def _metrics(run: Path) -> Metrics:
    found, file = GrowingMetrics(), run / "metrics.jsonl"
    if os.path.lexists(file):
        with open_regular(file, LARGEST_FILE) as stream:
            for block in blocks_of_lines(stream):
                add_lines(found, block)
    return found.now()


def add_lines(metrics: GrowingMetrics, block: bytes) -> None:
    """Add the rows of whole lines of metrics.jsonl, without secrets."""
    for value in parsed_lines(block.decode("utf-8", errors="replace")):
        metrics.add(value)


def _kind(config_text: str, metrics: Metrics) -> str:
    if (first := _FIRST_LINE.match(config_text)) is not None:
        return first[1]
    return "grpo" if any(key.startswith("reward/") for key in metrics.names()) else "sft"


def _without(name: str, values: dict[str, Any]) -> dict[str, Any]:
    return {each: value for each, value in values.items() if each != name}


def _mapping(parse: Callable[[str], Any], text: str) -> dict[str, Any] | None:
    """Parse a text; None where it is no mapping."""
    try:
        value = parse(text)
    except (ValueError, yaml.YAMLError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def recipe_of(text: str) -> Mapping[str, Any]:
    """Return the values of config.yaml, or of sections of it; none where it cannot be read."""
    return _mapping(_yaml, text) or {}


def _yaml(text: str) -> Any:
    """Parse what `render` wrote, by libyaml if PyYAML was built with it: ten times faster. libyaml's stack overflows
    on brackets by the ten thousand, so a longer text is left to PyYAML's own parser, which raises RecursionError."""
    if text.count("[") + text.count("{") > _MOST_BRACKETS:  # which would take seconds
        raise RecursionError
    is_short = len(text) <= _SHORT_YAML
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text) if is_short else yaml.SafeLoader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def steps_of(folder: Path) -> tuple[int, ...]:
    """Return the steps that rollouts/ or evaluations/ has a file of, in order."""
    names = os.listdir(folder) if folder.is_dir() and not is_linked(str(folder)) else []
    return tuple(sorted({int(match[1]) for name in names if (match := _STEP_FILE.fullmatch(name))}))


def _text(file: Path, largest: int = LARGEST_FILE) -> str:
    return redact(read_text(file, largest)) if os.path.lexists(file) else ""


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
