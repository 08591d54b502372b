"""A run as the list of runs needs it: the metrics of a few keys, and of config.yaml two sections."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tiercel.regular_files import read_text
from tiercel.web.report.files import MetricsTail, end_of_log, mapping_of, yaml_value
from tiercel.web.report.reading import RecordedRun

_LONGEST_CONFIG, _LONGEST_SECTIONS = 1 << 18, 1 << 13  # characters
_SECTIONS = re.compile(r"^(?:train|optim):[^\n]*\n(?:[ -][^\n]*\n)*", re.MULTILINE)
_KIND = re.compile(r"# tiercel ([a-z]+)\s")


def read_briefly(path: Path, keys: Collection[str]) -> RecordedRun | None:
    """Read a run with two sections of its recipe, and the metrics of some keys. None if its config.yaml is not as
    training writes it. Raises OSError if a file cannot be read."""
    text = read_text(path / "config.yaml", _LONGEST_CONFIG)
    kind, recipe = _KIND.match(text), _recipe(text)
    if kind is None or recipe is None:
        return None
    metrics = MetricsTail(path / "metrics.jsonl", is_over=True, keys=keys)
    metrics.refresh()
    run = RecordedRun(
        path=path,
        kind=kind[1],
        config_text="",
        recipe=recipe,
        environment={},
        metrics=metrics.rows.now(),
        bad_rows=(),
        log=() if isinstance(recipe["train"].get("steps"), int) else end_of_log(path / "log.txt"),
        rollout_steps=(),
        evaluation_steps=(),
        unreadable={},
    )
    return run if run.total_steps is not None else None


def _recipe(text: str) -> Mapping[str, Any] | None:
    found = "".join(_SECTIONS.findall(text))
    if len(found) > _LONGEST_SECTIONS or any(mark in found for mark in "&*[{"):
        return None
    recipe = mapping_of(yaml_value, found) or {}
    return recipe if all(isinstance(recipe.get(name), dict) for name in ("train", "optim")) else None
