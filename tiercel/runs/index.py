"""index.jsonl of a run: for each file of rollouts/ and evaluations/, a line with the place and numbers of each group.

It lets `tiercel view` find groups without reading the files, and can always be rebuilt from them. Imports no torch.
"""

import json
import statistics
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tiercel.regular_files import open_to_append
from tiercel.runs.files import json_line
from tiercel.runs.records import Folder, finite, groups_path
from tiercel.runs.step_files import lines_of_step

FILE = "index.jsonl"
DECIMALS = 4


_LISTS = ("ids", "starts", "bytes", "best", "mean", "worst", "judged", "right", "masked")


def new_entry(folder: Folder, step: int) -> dict[str, Any]:
    """Return the index entry of a step's file, to which `add_group` adds its groups.

    The lists of an entry have a number for each group: the `best`, `mean` and `worst` of the totals that are not
    masked, how many completions were `judged`, were `right` and were `masked`, and the mean of each reward.
    """
    return {"folder": folder, "step": step, **{name: [] for name in _LISTS}, "rewards": {}}


def add_group(entry: dict[str, Any], start: int, size: int, record: Mapping[str, Any]) -> None:
    """Add a group, by the offset of its first byte, its number of bytes and its record as JSON. Raises one of several
    errors, and leaves the entry as it is, if the record is malformed."""
    completions, count = record["completions"], len(entry["ids"])
    totals = [value for each in completions if (value := finite(each.get("total"))) is not None]
    judged = [each["correct"] for each in completions if each.get("correct") is not None]
    names = dict.fromkeys(name for each in completions for name in each["rewards"])
    rewards = {name: _mean(finite(each["rewards"].get(name)) for each in completions) for name in names}
    numbers = {
        "ids": record["id"],
        "starts": start,
        "bytes": size,
        "best": round(max(totals), DECIMALS) if totals else None,
        "mean": _mean(totals),
        "worst": round(min(totals), DECIMALS) if totals else None,
        "judged": len(judged),
        "right": sum(judged),
        "masked": len(completions) - len(totals),
    }
    for name, value in numbers.items():
        entry[name].append(value)
    for name in dict.fromkeys((*entry["rewards"], *rewards)):
        entry["rewards"].setdefault(name, [None] * count).append(rewards.get(name))


def file_entry(run: Path, folder: Folder, step: int) -> dict[str, Any]:
    """Build the entry of a step's file by reading it. Lines that are not groups are skipped. Raises OSError."""
    entry, start = new_entry(folder, step), 0
    for line in lines_of_step(groups_path(run, folder, step)):
        with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
            add_group(entry, start, len(line), json.loads(line))
        start += len(line)
    return entry


def append_entry(run: Path, entry: Mapping[str, Any]) -> None:
    """Append one line to index.jsonl. Raises OSError if it cannot be written."""
    with open_to_append(run / FILE) as file:
        file.write(json_line(entry))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.fmean(known), DECIMALS) if known else None
