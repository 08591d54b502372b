"""index.jsonl of a run: for each file of rollouts/ and evaluations/, a line with the place and numbers of each group.

It lets `tiercel view` find groups without reading the files, and can always be rebuilt from them. Imports no torch.
"""

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tiercel.regular_files import open_to_append
from tiercel.runs.files import json_line
from tiercel.runs.json_lines import cut_lines, is_up_to
from tiercel.runs.records import Folder, finite, groups_path
from tiercel.runs.step_files import lines_of_step

FILE = "index.jsonl"
DECIMALS = 4


def index_entry(folder: Folder, step: int, lines: Sequence[tuple[int, int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Build the index entry of a step's file. `lines` gives for each group the offset of its first byte, its number of
    bytes, and its record as JSON.

    The lists of an entry have a number for each group: the `best`, `mean` and `worst` of the totals that are not
    masked, how many completions were `judged`, were `right` and were `masked`, and the mean of each reward.
    """
    records = [record for _, _, record in lines]
    totals = [
        [value for each in _completions(record) if (value := finite(each.get("total"))) is not None]
        for record in records
    ]
    judged = [
        [each["correct"] for each in _completions(record) if each.get("correct") is not None] for record in records
    ]
    names = dict.fromkeys(name for record in records for each in _completions(record) for name in each["rewards"])
    return {
        "folder": folder,
        "step": step,
        "ids": [record["id"] for record in records],
        "starts": [start for start, _, _ in lines],
        "bytes": [size for _, size, _ in lines],
        "best": [round(max(values), DECIMALS) if values else None for values in totals],
        "mean": [_mean(values) for values in totals],
        "worst": [round(min(values), DECIMALS) if values else None for values in totals],
        "judged": list(map(len, judged)),
        "right": list(map(sum, judged)),
        "masked": [len(_completions(record)) - len(values) for record, values in zip(records, totals, strict=True)],
        "rewards": {name: [_mean(_rewards(record, name)) for record in records] for name in names},
    }


def written_entry(
    folder: Folder, step: int, lines: Sequence[str], records: Sequence[Mapping[str, Any]], start: int = 0
) -> dict[str, Any]:
    """Build the entry of a step's file, or of the part of it from byte `start` on, whose lines were just made from
    these records."""
    placed = []
    for line, record in zip(lines, records, strict=True):
        size = len(line.encode("utf-8"))
        placed.append((start, size, record))
        start += size
    return index_entry(folder, step, placed)


def joined_entry(folder: Folder, step: int, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the entries of the parts of a step's file."""
    whole = index_entry(folder, step, [])
    for name in (name for name, values in whole.items() if isinstance(values, list)):
        whole[name] = [value for part in parts for value in part[name]]
    for name in dict.fromkeys(name for part in parts for name in part["rewards"]):
        lists = (part["rewards"].get(name, [None] * len(part["ids"])) for part in parts)
        whole["rewards"][name] = [value for values in lists for value in values]
    return whole


def file_entry(run: Path, folder: Folder, step: int) -> dict[str, Any]:
    """Build the entry of a step's file by reading it. Lines that are not groups are skipped. Raises OSError."""
    placed, start = [], 0
    for line in lines_of_step(groups_path(run, folder, step)):
        try:
            record = json.loads(line)
            index_entry(folder, step, [(start, len(line), record)])
            placed.append((start, len(line), record))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            pass
        start += len(line)
    return index_entry(folder, step, placed)


def append_entry(run: Path, entry: Mapping[str, Any]) -> None:
    """Append one line to index.jsonl. Raises OSError if it cannot be written."""
    with open_to_append(run / FILE) as file:
        file.write(json_line(entry))


def cut_index(run: Path, last_step: int) -> None:
    """Remove the lines of later steps. Raises OSError if the file cannot be written."""
    if os.path.lexists(run / FILE):
        cut_lines(run / FILE, partial(is_up_to, last_step))


def _completions(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return record["completions"]


def _rewards(record: Mapping[str, Any], name: str) -> list[float]:
    values = [finite(each["rewards"].get(name)) for each in _completions(record)]
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return round(statistics.fmean(values), DECIMALS) if values else None
