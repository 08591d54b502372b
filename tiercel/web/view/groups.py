"""The groups of a run as columns of numbers, from its index; files without one are read in the background."""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from tiercel.runs.index import FILE, file_entry
from tiercel.runs.records import Folder, groups_path
from tiercel.runs.step_files import steps_of, stored
from tiercel.web.report.files import Tail

FOLDERS: tuple[Folder, ...] = get_args(Folder)
# Of a line that is not an entry.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
_NUMBERS = ("starts", "bytes", "best", "mean", "worst", "judged", "right", "masked")  # of an entry; None is NaN
_KNOWN = 3 + len(_NUMBERS)  # columns of a table before its rewards
_PATIENCE_SECONDS = 3.0  # in which the run writes the index line of a file that it has just written


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The groups of rollouts/ or evaluations/, by step and place in the file; all arrays are equally long."""

    steps: np.ndarray
    places: np.ndarray  # in the step's file, from 0
    ids: np.ndarray  # codes of the ids of rows
    codes: Mapping[str, int]  # by id; those of later groups may come
    starts: np.ndarray  # of the group's bytes in its file
    bytes: np.ndarray
    best: np.ndarray  # NaN if every completion is masked
    mean: np.ndarray
    worst: np.ndarray
    judged: np.ndarray
    right: np.ndarray
    masked: np.ndarray
    rewards: Mapping[str, np.ndarray]  # means, NaN if the group has none

    def __len__(self) -> int:
        return len(self.steps)


class _Steps:
    """The groups of a folder. Each step has the names of its rewards, and a table of numbers with a row for each group:
    its step, its place, the code of its id, each of _NUMBERS and each reward."""

    def __init__(self) -> None:
        self.tables: dict[int, tuple[tuple[str, ...], np.ndarray]] = {}  # by step
        self._codes: dict[str, int] = {}

    def add(self, entry: Mapping[str, Any]) -> None:
        """Take the entry of a step, in place of the one that it had. Raises one of MALFORMED if it is malformed."""
        ids, rewards, step = list(map(str, entry["ids"])), tuple(map(str, entry["rewards"])), int(entry["step"])
        codes, places = [self._codes.setdefault(id, len(self._codes)) for id in ids], range(len(ids))
        lines = [[step] * len(ids), places, codes, *(entry[name] for name in _NUMBERS), *entry["rewards"].values()]
        numbers = np.array(lines, dtype=np.float64)  # ValueError for lists of different lengths
        if numbers.shape != (len(lines), len(ids)):
            raise ValueError("a list in a list")
        self.tables[step] = rewards, numbers.T

    def columns(self, there: set[int]) -> Columns:
        """Return the groups of the steps whose files are there."""
        tables = [self.tables[step] for step in sorted(there & self.tables.keys())]
        rewards = list(dict.fromkeys(name for names in dict.fromkeys(names for names, _ in tables) for name in names))
        nothing = np.empty((0, _KNOWN + len(rewards)))
        table = np.concatenate([nothing, *(_aligned(own, names, rewards) for names, own in tables)])
        steps, places, ids = (table[:, column].astype(np.int64) for column in range(3))
        return Columns(
            steps=steps,
            places=places,
            ids=ids,
            codes=self._codes,
            rewards={name: table[:, _KNOWN + place] for place, name in enumerate(rewards)},
            **{name: table[:, 3 + place] for place, name in enumerate(_NUMBERS)},
        )


def _aligned(table: np.ndarray, rewards: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """Return a table with a column for each of `names`, NaN if its groups do not have that reward."""
    if list(rewards) == list(names):
        return table
    wide = np.full((len(table), _KNOWN + len(names)), np.nan)
    wide[:, [*range(_KNOWN), *(_KNOWN + names.index(name) for name in rewards)]] = table
    return wide


class _Index(Tail):
    """The lines of index.jsonl, by folder in `steps`."""

    def drop(self) -> None:
        self.steps = {folder: _Steps() for folder in FOLDERS}

    def add(self, values: list[Any]) -> None:
        for entry in values:
            with suppress(*MALFORMED):
                self.steps[entry["folder"]].add(entry)


class Groups:
    """Where each group of a run is, and its numbers. `refresh` may be called by any thread."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._index = _Index(run / FILE, is_over=False)
        self._there: dict[Folder, set[int]] = {folder: set() for folder in FOLDERS}  # steps that have a file
        self._columns: dict[Folder, Columns] = {}
        self.unread: list[tuple[Folder, int]] = []  # files that the index does not know, newest first

    def columns(self, folder: Folder) -> Columns:
        """Return the groups that are known by now."""
        with self._lock:
            if folder not in self._columns:
                self._columns[folder] = self._index.steps[folder].columns(self._there[folder])
            return self._columns[folder]

    def refresh(self) -> None:
        """Read the new lines of the index, and note the files that it does not know. Raises OSError."""
        with self._lock:
            self._index.refresh()
            there = {folder: set(steps_of(self._run / folder)) for folder in FOLDERS}
            if not (self._run / FILE).exists() and any(self._there[folder] - there[folder] for folder in FOLDERS):
                self._index.drop()  # the run was cut, and its files may be others when they come again
            self._there = there
            self._columns.clear()
            steps = self._index.steps
            missing = [(folder, step) for folder in FOLDERS for step in there[folder] - steps[folder].tables.keys()]
            self.unread = sorted(filter(self._is_due, missing), key=lambda each: -each[1])

    def read_unread(self, seconds: float) -> None:
        """Describe files that the index does not know, for about this long."""
        until = time.monotonic() + seconds
        while self.unread and time.monotonic() < until:
            folder, step = self.unread[0]
            entry: Mapping[str, Any] = {}
            with suppress(OSError):
                entry = file_entry(self._run, folder, step)
            with self._lock:
                if self.unread and self.unread[0] == (folder, step):
                    del self.unread[0]
                    if entry and step not in self._index.steps[folder].tables:
                        with suppress(*MALFORMED):
                            self._index.steps[folder].add(entry)
                        self._columns.pop(folder, None)

    def _is_due(self, file: tuple[Folder, int]) -> bool:
        """Whether the run, which writes a file and then its line, will not add the line any more."""
        try:
            changed = os.stat(stored(groups_path(self._run, *file))).st_mtime
        except OSError:
            return False
        return not (self._run / FILE).exists() or time.time() - changed > _PATIENCE_SECONDS
