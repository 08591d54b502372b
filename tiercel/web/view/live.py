"""A run directory that is read again and again: of files that grow, only what is new."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tiercel.regular_files import LARGEST_FILE, open_regular
from tiercel.reliability.diagnosis import Diagnosis, Symptom
from tiercel.reliability.heartbeat import HEARTBEATS
from tiercel.reliability.redaction import redact
from tiercel.runs.index import FILE as INDEX
from tiercel.runs.json_lines import blocks_of_lines
from tiercel.web.report.metrics import GrowingMetrics
from tiercel.web.report.reading import Run, add_lines, assembled, noted, parsed_lines
from tiercel.web.view.groups import Groups

_LOG_BYTES = 65536  # of the end of log.txt
# What the page shows by kind, and the files and folders that it comes from.
KINDS: Mapping[str, tuple[str, ...]] = {
    "metrics": ("config.yaml", "metrics.jsonl"),
    "groups": (INDEX, "rollouts", "evaluations", "tokens"),
    "ranks": (HEARTBEATS, "end.json", "stall"),
    "rest": ("config.yaml", "env.json", "bad_rows.jsonl", "log.txt"),
}
Sign = tuple[int, int, int]  # inode, size, time of the last change


def sign_of(path: Path) -> Sign | None:
    """Return what changes when a file or the names in a folder change; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


class Tail:
    """The lines of a file that grows, in `values`. A file that was replaced or became shorter is read again from its
    start."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.values: list[Any] = []
        self._inode = self._read = 0

    def refresh(self) -> bool:
        """Read what is new. Returns whether the lines that were there before were dropped. Raises OSError."""
        sign = sign_of(self.file)
        is_new = sign is None or sign[0] != self._inode or sign[1] < self._read
        if is_new:
            self.drop()
            self._inode, self._read = sign[0] if sign else 0, 0
        if sign is not None and sign[1] > self._read:
            with open_regular(self.file, LARGEST_FILE) as file:
                file.seek(self._read)
                for block in blocks_of_lines(file, sign[1]):
                    if block.endswith(b"\n"):
                        self._read += len(block)
                        self.add(block)
        return is_new

    def drop(self) -> None:
        """Forget all lines."""
        self.values = []

    def add(self, block: bytes) -> None:
        """Take whole lines that are new."""
        self.values += parsed_lines(block.decode("utf-8", errors="replace"))


class MetricsTail(Tail):
    """The rows of metrics.jsonl, in `rows`."""

    def drop(self) -> None:
        self.rows = GrowingMetrics()

    def add(self, block: bytes) -> None:
        add_lines(self.rows, block)


class LiveRun:
    """A run that may still be written. Any thread may call it."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.groups = Groups(path)
        self.has_readers = False  # of its groups; then they are kept up to date
        self._metrics, self._bad_rows = MetricsTail(path / "metrics.jsonl"), Tail(path / "bad_rows.jsonl")
        self._lock, self._drawing, self._diagnosing = threading.Lock(), threading.Lock(), threading.Lock()
        self._signs: Mapping[str, Any] = {}
        self._run: Run | None = None
        self._drawn: tuple[Run, Markup] | None = None
        self._cuts = self._diagnosed_cuts = 0  # how often lines of metrics were dropped
        self._diagnosis, self._diagnosed, self._symptoms = Diagnosis(), 0, list[Symptom]()

    def signs(self) -> dict[str, tuple[Any, ...]]:
        """Return for each kind what changes when the page has something new to show."""
        signs = {kind: tuple(sign_of(self.path / name) for name in names) for kind, names in KINDS.items()}
        signs["ranks"] += tuple(sorted(map(sign_of, (self.path / HEARTBEATS).glob("rank-*.json")), key=str))
        return signs

    def known_groups(self) -> Groups:
        """Return the groups, of which the index is read at the first call. Raises OSError."""
        if not self.has_readers:
            self.groups.refresh()
            self.has_readers = True
        return self.groups

    def read(self) -> Run:
        """Return the run as it is now. Raises OSError where it cannot be read."""
        with self._lock:
            signs = {kind: sign for kind, sign in self.signs().items() if kind != "ranks"}
            if self._run is None or signs != self._signs:
                self._cuts += self._metrics.refresh()
                problems, nothing = list[str](), tuple[str, ...]()
                noted("bad_rows.jsonl", self._bad_rows.refresh, False, problems)
                log = noted("log.txt", self._log, nothing, problems)
                rows = self._metrics.rows.now()
                self._run = assembled(self.path, rows, self._bad_rows.values, log, problems)
                self._signs = signs
            return self._run

    def drawn(self, draw: Callable[[Run], Markup]) -> Markup:
        """Return the part that takes longest to draw, drawn again only where the run has changed. Raises OSError."""
        run = self.read()
        with self._drawing:
            if self._drawn is None or self._drawn[0] is not run:
                self._drawn = run, draw(run)
            return self._drawn[1]

    def symptoms(self) -> list[Symptom]:
        """Return the faults that the metrics show, which takes a second for 10,000 steps at first. Raises OSError."""
        run = self.read()
        with self._diagnosing:
            if self._diagnosed_cuts != self._cuts:
                self._diagnosis, self._diagnosed, self._symptoms = Diagnosis(), 0, []
                self._diagnosed_cuts = self._cuts
            for row in run.metrics.since(self._diagnosed):
                self._symptoms += self._diagnosis.add(row)
                self._diagnosed += 1
                if self._diagnosed % 100 == 0:
                    time.sleep(0.002)  # the turn of those who answer other requests
            return list(self._symptoms)

    def _log(self) -> tuple[str, ...]:
        file = self.path / "log.txt"
        if not os.path.lexists(file):
            return ()
        with open_regular(file) as lines:
            size = lines.seek(0, os.SEEK_END)
            lines.seek(max(0, size - _LOG_BYTES))
            text = lines.read(_LOG_BYTES).decode("utf-8", errors="replace")
        return tuple(redact(text).splitlines()[1 if size > _LOG_BYTES else 0 :])
