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

from tiercel.regular_files import LARGEST_FILE, open_regular
from tiercel.runs.index import FILE, file_entry
from tiercel.runs.json_lines import blocks_of_lines
from tiercel.runs.records import Folder, groups_path
from tiercel.web.report.reading import steps_of

FOLDERS: tuple[Folder, ...] = get_args(Folder)
# Of a line that is no entry.
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
_NUMBERS = ("best", "mean", "worst")  # columns of an entry that may be None
_COUNTS = ("starts", "bytes", "judged", "right", "masked")
_KINDS = {
    "steps": "q",
    "starts": "q",
    **dict.fromkeys(("places", "ids", *_COUNTS[1:]), "i"),
    **dict.fromkeys(_NUMBERS, "d"),
}
_PATIENCE_SECONDS = 3.0  # in which the run writes the index line of a file that it has just written


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The groups of rollouts/ or evaluations/, by step and place in the file; all arrays are equally long."""

    steps: np.ndarray
    places: np.ndarray  # in the step's file, from 0
    ids: np.ndarray  # codes, see `names`
    names: Sequence[str]  # ids of rows by code; those of later groups may come
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


class _Numbers:
    """Numbers that others are added to. What was given away is not copied, and stays as it is."""

    def __init__(self, kind: str) -> None:
        self.kind = kind  # as array and numpy both name it
        self._kept, self._count = np.empty(1024, dtype=kind), 0

    def __len__(self) -> int:
        return self._count

    def extend(self, values: array | np.ndarray) -> None:
        needed = self._count + len(values)
        if needed > len(self._kept):
            grown = np.empty(max(needed, len(self._kept) * 3 // 2), dtype=self.kind)
            grown[: self._count] = self.now()
            self._kept = grown
        self._kept[self._count : needed] = values
        self._count = needed

    def now(self) -> np.ndarray:
        return self._kept[: self._count]


@dataclass(kw_only=True, slots=True)
class _Growing:
    """Columns that entries are added to."""

    columns: dict[str, _Numbers] = field(default_factory=lambda: {name: _Numbers(_KINDS[name]) for name in _KINDS})
    rewards: dict[str, _Numbers] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    codes: dict[str, int] = field(default_factory=dict)
    steps: set[int] = field(default_factory=set)
    again: dict[int, int] = field(default_factory=dict)  # where what counts of a step begins, if it came twice
    is_ordered: bool = True  # each entry is of a later step than those before

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add the groups of a step; they replace those that it had. Raises one of MALFORMED, and adds nothing, where
        the entry is malformed."""
        ids, count, before, step = list(map(str, entry["ids"])), len(entry["ids"]), self.count, entry["step"]
        added = {name: array(_KINDS[name], entry[name]) for name in _COUNTS}
        added |= {name: array(_KINDS[name], _floats(entry[name])) for name in _NUMBERS}
        added |= {"steps": array("q", [step]) * count, "places": array("i", range(count))}
        rewards = {str(name): array("d", _floats(values)) for name, values in entry["rewards"].items()}
        if any(len(values) != count for values in (*added.values(), *rewards.values())):
            raise ValueError("lists of different lengths")
        if step in self.steps:
            self.again[step] = before
        for id in ids:
            if id not in self.codes:
                self.codes[id] = len(self.names)
                self.names.append(id)
        added["ids"] = array("i", [self.codes[id] for id in ids])
        steps = self.columns["steps"].now()
        self.is_ordered = self.is_ordered and (before == 0 or step > steps[-1])
        for name, values in added.items():
            self.columns[name].extend(values)
        for name, values in rewards.items():
            column = self.rewards.setdefault(name, _Numbers("d"))
            column.extend(np.full(before - len(column), np.nan))
            column.extend(values)
        self.steps.add(step)

    @property
    def count(self) -> int:
        return len(self.columns["steps"])

    def frozen(self) -> Columns:
        """Return what is there, in the order of the steps."""
        for column in self.rewards.values():
            column.extend(np.full(self.count - len(column), np.nan))
        columns = {name: column.now() for name, column in self.columns.items()}
        rewards = {name: column.now() for name, column in self.rewards.items()}
        if self.again or not self.is_ordered:
            order = self._order()
            columns, rewards = ({name: each[order] for name, each in some.items()} for some in (columns, rewards))
        return Columns(names=self.names, codes=self.codes, rewards=rewards, **columns)

    def _order(self) -> np.ndarray:
        """Return the positions that count, by step and place."""
        steps, places = self.columns["steps"].now(), self.columns["places"].now()
        counts = np.ones(self.count, dtype=bool)
        if self.again:
            known = np.array(sorted(self.again), dtype=np.int64)
            begins = np.array([self.again[step] for step in known.tolist()])
            at = np.minimum(np.searchsorted(known, steps), len(known) - 1)
            counts = (known[at] != steps) | (np.arange(self.count) >= begins[at])
        chosen = np.flatnonzero(counts)
        return chosen[np.lexsort((places[chosen], steps[chosen]))]


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
        with open_regular(self._run / FILE, LARGEST_FILE) as file:
            file.seek(self._read)
            for block in blocks_of_lines(file, found.st_size):
                if block.endswith(b"\n"):
                    self._read += len(block)
                    self._add_lines(block)
        self._frozen.clear()

    def _add_lines(self, block: bytes) -> None:
        for line in block.split(b"\n"):
            try:
                entry = json.loads(line)
                self._growing[entry["folder"]].add(entry)
            except MALFORMED:
                continue
