"""The groups of a run as columns of numbers, from its index; files without one are read in the background."""

import json
import os
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np

from tiercel.report.reading import steps_of
from tiercel.runs.group_records import Folder, groups_path
from tiercel.runs.index import FILE, file_entry

FOLDERS: tuple[Folder, ...] = get_args(Folder)
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError)  # of a line that is no entry
_NUMBERS = ("best", "mean", "worst")  # columns of an entry that may be None
_COUNTS = ("starts", "bytes", "judged", "right", "masked")
_PATIENCE_SECONDS = 3.0  # in which the run writes the index line of a file that it has just written


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The groups of rollouts/ or evaluations/, by step and place in the file; all arrays are equally long."""

    steps: np.ndarray
    places: np.ndarray  # in the step's file, from 0
    ids: np.ndarray  # codes, see `names`
    names: Sequence[str]  # ids of rows by code
    codes: Mapping[str, int]
    starts: np.ndarray  # of the group's bytes in its file
    bytes: np.ndarray
    best: np.ndarray  # NaN where every completion is masked
    mean: np.ndarray
    worst: np.ndarray
    judged: np.ndarray
    right: np.ndarray
    masked: np.ndarray
    rewards: Mapping[str, np.ndarray]  # means, NaN where the group has none

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(kw_only=True, slots=True)
class _Growing:
    """Columns that entries are added to."""

    columns: dict[str, array] = field(default_factory=lambda: {name: array("d") for name in _NUMBERS})
    whole: dict[str, array] = field(
        default_factory=lambda: {name: array("q") for name in ("steps", "places", "ids", *_COUNTS)}
    )
    rewards: dict[str, array] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    codes: dict[str, int] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add the groups of a step. Raises one of MALFORMED, and adds nothing, where the entry is malformed."""
        ids, count, before = list(map(str, entry["ids"])), len(entry["ids"]), len(self.whole["steps"])
        columns = {name: array("d", _floats(entry[name])) for name in _NUMBERS}
        whole = {name: array("q", entry[name]) for name in _COUNTS}
        rewards = {str(name): array("d", _floats(values)) for name, values in entry["rewards"].items()}
        whole |= {"steps": array("q", [entry["step"]] * count), "places": array("q", range(count))}
        if any(len(values) != count for values in (*columns.values(), *whole.values(), *rewards.values())):
            raise ValueError("lists of different lengths")
        for name, values in columns.items():
            self.columns[name].extend(values)
        for name, numbers in whole.items():
            self.whole[name].extend(numbers)
        for id in ids:
            if id not in self.codes:
                self.codes[id] = len(self.names)
                self.names.append(id)
        self.whole["ids"].extend(self.codes[id] for id in ids)
        for name, values in rewards.items():
            column = self.rewards.setdefault(name, array("d"))
            column.extend([np.nan] * (before - len(column)))
            column.extend(values)
        self.steps.add(entry["step"])

    def frozen(self) -> Columns:
        """Copy what is there, in the order of the steps."""
        whole = {name: np.array(values, dtype=np.int64) for name, values in self.whole.items()}
        count = len(whole["steps"])
        order = np.lexsort((whole["places"], whole["steps"]))
        padded = {name: np.full(count, np.nan) for name in self.rewards}
        for name, values in self.rewards.items():
            padded[name][: len(values)] = values
        return Columns(
            names=tuple(self.names),
            codes=dict(self.codes),
            rewards={name: values[order] for name, values in padded.items()},
            **{name: np.array(values)[order] for name, values in self.columns.items()},
            **{name: values[order] for name, values in whole.items()},
        )


def _floats(values: Sequence[float | None]) -> list[float]:
    return [np.nan if value is None else value for value in values]


class Groups:
    """Where each group of a run is, and its numbers. `refresh` may be called by any thread."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._gone: set[tuple[Folder, int]] = set()  # in the index, without a file
        self._reset()

    def _reset(self) -> None:
        self._growing = {folder: _Growing() for folder in FOLDERS}
        self._frozen: dict[Folder, Columns] = {}
        self._inode = self._read = 0
        self.unread: list[tuple[Folder, int]] = []  # files that the index does not know, newest first

    def columns(self, folder: Folder) -> Columns:
        """Return the groups that are known by now."""
        with self._lock:
            if folder not in self._frozen:
                self._frozen[folder] = self._growing[folder].frozen()
            return self._frozen[folder]

    def refresh(self) -> None:
        """Read the new lines of the index, and note the files that it does not know. Raises OSError."""
        with self._lock:
            self._read_index()
            there = {folder: set(steps_of(self._run / folder)) for folder in FOLDERS}
            gone = {(folder, step) for folder in FOLDERS for step in self._growing[folder].steps - there[folder]}
            if gone - self._gone:  # the run was cut
                self._reset()
                self._read_index()
            self._gone = gone
            missing = [(folder, step) for folder in FOLDERS for step in there[folder] - self._growing[folder].steps]
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
                    if entry and step not in self._growing[folder].steps:
                        with suppress(*MALFORMED):
                            self._growing[folder].add(entry)
                        self._frozen.pop(folder, None)

    def _is_due(self, file: tuple[Folder, int]) -> bool:
        """Whether the run, which writes a file and then its line, will not add the line any more."""
        try:
            changed = os.stat(groups_path(self._run, *file)).st_mtime
        except OSError:
            return False
        return not (self._run / FILE).exists() or time.time() - changed > _PATIENCE_SECONDS

    def _read_index(self) -> None:
        try:
            found = os.stat(self._run / FILE)
        except OSError:
            return
        if found.st_ino != self._inode or found.st_size < self._read:
            self._reset()
            self._inode = found.st_ino
        if found.st_size <= self._read:
            return
        with (self._run / FILE).open("rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read(found.st_size - self._read).rpartition(b"\n")
        self._read += len(whole) + len(newline)
        known = {folder: set(growing.steps) for folder, growing in self._growing.items()}
        for line in reversed(whole.split(b"\n")):  # of a step that was written again the last line counts
            try:
                entry = json.loads(line)
                folder, step = entry["folder"], entry["step"]
                if step in known[folder]:
                    self._reset()
                    self._read_index()
                    return
                if step not in self._growing[folder].steps:
                    self._growing[folder].add(entry)
            except MALFORMED:
                continue
        self._frozen.clear()
