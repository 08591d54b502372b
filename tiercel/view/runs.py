"""The runs that a page shows: those given, and those found in the folders given."""

import threading
from collections.abc import Sequence
from pathlib import Path

from tiercel.errors import RunError
from tiercel.report.listing import runs_below
from tiercel.view.live import LiveRun, sign_of

_DEPTH = 2  # folders below one that is given
_MOST_RUNS = 200


class Runs:
    """The runs by name. Folders are looked through again at each `refresh`, so new runs appear."""

    def __init__(self, given: Sequence[Path], *, may_come: bool = False) -> None:
        """`may_come`: a directory that is given may become a run later. Raises RunError where one is neither a run nor
        a folder with runs."""
        self._given = tuple(path.absolute() for path in given)
        self._lock = threading.Lock()
        self._by_path: dict[Path, LiveRun] = {}
        self._may_come = may_come
        self.left_out = 0  # runs that are older than those of the page
        for path in self._given:
            if not may_come and not any(runs_below(path, _DEPTH)):
                raise RunError(f"{path} is no run, and no run lies in it: no config.yaml was found")
        self.refresh()

    def refresh(self) -> bool:
        """Look for runs. Returns whether there are others than before."""
        every = list(dict.fromkeys(path for given in self._given for path in self._of(given)))
        paths, self.left_out = _newest(every), max(0, len(every) - _MOST_RUNS)
        with self._lock:
            if paths == list(self._by_path):
                return False
            names = _names(paths)
            self._by_path = {
                path: known if (known := self._by_path.get(path)) and known.name == name else LiveRun(name, path)
                for path, name in zip(paths, names, strict=True)
            }
            return True

    def _of(self, given: Path) -> list[Path]:
        return [*runs_below(given, _DEPTH)] or ([given] if self._may_come else [])

    def all(self) -> list[LiveRun]:
        """Return the runs in the order of the page."""
        with self._lock:
            return list(self._by_path.values())

    def named(self, name: str) -> LiveRun | None:
        """Return the run of this name; None where there is none."""
        return next((run for run in self.all() if run.name == name), None)


def _newest(paths: Sequence[Path]) -> list[Path]:
    """Keep the runs that changed last, where they are too many for a page, in their order."""
    if len(paths) <= _MOST_RUNS:
        return list(paths)
    times = {path: sign[2] if (sign := sign_of(path)) else 0 for path in paths}
    kept = set(sorted(paths, key=lambda path: times[path])[-_MOST_RUNS:])
    return [path for path in paths if path in kept]


def _names(paths: Sequence[Path]) -> list[str]:
    """Name each run by its directory; those of the same name by as many of the directories above as tell them apart."""
    names = []
    for path in paths:
        parts = 1
        while sum(other.parts[-parts:] == path.parts[-parts:] for other in paths) > 1 and parts < len(path.parts):
            parts += 1
        names.append("/".join(path.parts[-parts:]))
    return names
