"""A run as the list of runs needs it: of metrics.jsonl a few numbers of each row, of config.yaml two sections.

It takes what training writes: a line for each step, in their order, without a backslash or a list. There `"loss": ` can
only be a key of the row. What has another form is left to `read_run`, which reads everything.
"""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tiercel.regular_files import LARGEST_FILE, open_regular, read_text
from tiercel.runs.json_lines import blocks_of_lines
from tiercel.web.report.files import end_of_log, mapping_of, yaml_value
from tiercel.web.report.metrics import Metrics
from tiercel.web.report.reading import RecordedRun

_LONGEST_CONFIG, _LONGEST_SECTIONS = 1 << 18, 1 << 13  # characters
_LARGEST_STEP = 1 << 53  # that a column holds
_SECTIONS = re.compile(r"^(?:train|optim):[^\n]*\n(?:[ -][^\n]*\n)*", re.MULTILINE)
_KIND = re.compile(r"# tiercel ([a-z]+)\s")
_FIRST = b'{"step": '


def read_briefly(path: Path, keys: Sequence[str]) -> RecordedRun | None:
    """Read a run with two sections of its recipe, and the metrics of some keys. None if one of its files is not as
    training writes it. Raises OSError if one cannot be read."""
    text = read_text(path / "config.yaml", _LONGEST_CONFIG)
    kind, recipe = _KIND.match(text), _recipe(text)
    metrics = _metrics(path / "metrics.jsonl", keys) if kind and recipe else None
    if kind is None or recipe is None or metrics is None:
        return None
    run = RecordedRun(
        path=path,
        kind=kind[1],
        config_text="",
        recipe=recipe,
        environment={},
        metrics=metrics,
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


def _metrics(file: Path, keys: Sequence[str]) -> Metrics | None:
    """Return the numbers under these keys; None if a line has another form."""
    steps, numbers = list[int](), {key.encode(): dict[int, float]() for key in keys}
    pairs = re.compile(rb'"(step|%b)": ([^,}]+)' % b"|".join(map(re.escape, numbers)))
    if file.exists():
        with open_regular(file, LARGEST_FILE) as stream:
            for block in blocks_of_lines(stream):
                if not _add(block, pairs, steps, numbers):
                    return None
    is_ordered = all(before < after for before, after in pairwise(steps))
    found = {key.decode(): values for key, values in numbers.items()}
    return Metrics.of_numbers(steps, found) if is_ordered and steps[-1:] < [_LARGEST_STEP] else None


def _add(block: bytes, pairs: re.Pattern, steps: list[int], numbers: Mapping[bytes, dict[int, float]]) -> bool:
    """Add steps, and numbers by place; say whether the lines have the known form."""
    lines, before = block.split(b"\n"), len(steps)
    is_whole = lines.pop() == b"" and len(lines) == block.count(b"{") == block.count(b"}\n")
    if not is_whole or b"\\" in block or b"[" in block or not all(line.startswith(_FIRST) for line in lines):
        return False
    for key, value in pairs.findall(block):
        try:
            if key == b"step":
                steps.append(int(value))
            elif math.isfinite(number := float(value)):
                numbers[key][len(steps) - 1] = number
        except ValueError:
            if key == b"step" or value != b"null":
                return False
    return len(steps) - before == len(lines)
