"""A run directory that is read again and again: of files that grow, only what is new."""

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from markupsafe import Markup

from tiercel.reliability.diagnosis import Diagnosis, Symptom
from tiercel.reliability.heartbeat import HEARTBEATS
from tiercel.runs.index import FILE as INDEX
from tiercel.web.report.files import sign_of
from tiercel.web.report.page_sections import curves_part
from tiercel.web.report.reading import RecordedRun, RunReader
from tiercel.web.report.verdict import notices
from tiercel.web.view.groups import Groups

# What the page shows by kind, and the files and folders that it comes from.
KINDS: Mapping[str, tuple[str, ...]] = {
    "metrics": ("config.yaml", "metrics.jsonl"),
    "groups": (INDEX, "rollouts", "evaluations", "tokens"),
    "ranks": (HEARTBEATS, "end.json", "stall"),
    "rest": ("config.yaml", "env.json", "bad_rows.jsonl", "log.txt"),
}


class LiveRun:
    """A run that may still be written. Any thread may call it."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.path = path
        self.groups = Groups(path)
        self.has_readers = False  # of its groups; then they are kept up to date
        self._reader = RunReader(path)
        self._lock, self._drawing, self._diagnosing = threading.Lock(), threading.Lock(), threading.Lock()
        self._signs: Mapping[str, Any] = {}
        self._run: RecordedRun | None = None
        self._drawn: tuple[RecordedRun, Markup] | None = None
        self._diagnosed_cuts = 0
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

    def read(self) -> RecordedRun:
        """Return the run as it is now. Raises OSError if it cannot be read."""
        with self._lock:
            signs = {kind: sign for kind, sign in self.signs().items() if kind != "ranks"}
            if self._run is None or signs != self._signs:
                self._run = self._reader.read()
                self._signs = signs
            return self._run

    def overview(self) -> Markup:
        """Return the verdict, the problems of the run, and its curves, drawn again only if the run has changed. The
        script asks for the findings afterwards. Raises OSError."""
        run = self.read()
        with self._drawing:
            if self._drawn is None or self._drawn[0] is not run:
                self._drawn = run, curves_part(run, notices(run))
            return self._drawn[1]

    def symptoms(self) -> list[Symptom]:
        """Return the faults that the metrics show, which takes a second for 10,000 steps at first. Raises OSError."""
        run = self.read()
        with self._diagnosing:
            if self._diagnosed_cuts != self._reader.cuts:
                self._diagnosis, self._diagnosed, self._symptoms = Diagnosis(), 0, []
                self._diagnosed_cuts = self._reader.cuts
            for row in run.metrics.since(self._diagnosed):
                self._symptoms += self._diagnosis.add(row)
                self._diagnosed += 1
                if self._diagnosed % 100 == 0:
                    time.sleep(0.002)  # the turn of those who answer other requests
            return list(self._symptoms)
