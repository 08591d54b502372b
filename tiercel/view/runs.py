"""The runs that a page shows: those given, and those found in the folders given."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

from tiercel.errors import RunError
from tiercel.view.live import LiveRun

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
        for path in self._given:
            if not may_come and not _found(path):
                raise RunError(f"{path} is no run, and no run lies in it: no config.yaml was found")
        self.refresh()

    def refresh(self) -> bool:
        """Look for runs. Returns whether there are others than before."""
        paths = list(dict.fromkeys(path for given in self._given for path in self._of(given)))[:_MOST_RUNS]
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
        return _found(given) or ([given] if self._may_come else [])

    def all(self) -> list[LiveRun]:
        """Return the runs in the order of the page."""
        with self._lock:
            return list(self._by_path.values())

    def named(self, name: str) -> LiveRun | None:
        """Return the run of this name; None where there is none."""
        return next((run for run in self.all() if run.name == name), None)


def _found(given: Path) -> list[Path]:
    if (given / "config.yaml").is_file():
        return [given]
    return sorted(_below(given, _DEPTH))


def _below(folder: Path, depth: int) -> list[Path]:
    try:
        inside = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith(".")]
    except OSError:
        return []
    runs = [path for path in inside if (path / "config.yaml").is_file()]
    others = [path for path in inside if path not in runs] if depth > 1 else []
    return runs + [path for other in others for path in _below(other, depth - 1)]


def _names(paths: Sequence[Path]) -> list[str]:
    """Name each run by its directory; those of the same name by as many of the directories above as tell them apart."""
    names = []
    for path in paths:
        parts = 1
        while sum(other.parts[-parts:] == path.parts[-parts:] for other in paths) > 1 and parts < len(path.parts):
            parts += 1
        names.append("/".join(path.parts[-parts:]))
    return names
