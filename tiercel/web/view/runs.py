"""The runs that a page shows: those given, and those found in the folders given."""

import asyncio
import json
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from tiercel.errors import RunError
from tiercel.reliability.redaction import redact
from tiercel.web.report.files import sign_of
from tiercel.web.report.listing import runs_below
from tiercel.web.view.live import LiveRun

_DEPTH = 2  # folders below one that is given
_MOST_RUNS = 200


class Runs:
    """The runs by name. Folders are looked through again at each `refresh`, so new runs appear."""

    def __init__(self, given: Sequence[Path], *, may_come: bool = False) -> None:
        """`may_come`: a directory that is given may become a run later. Raises RunError if one is neither a run nor
        a folder with runs."""
        self._given = tuple(path.absolute() for path in given)
        self._lock = threading.Lock()
        self._by_path: dict[Path, LiveRun] = {}
        self._may_come = may_come
        self.left_out = 0  # runs that are older than those of the page
        for path in self._given:
            if not may_come and not any(runs_below(path, _DEPTH)):
                raise RunError(f"{path} is not a run and contains none: no config.yaml was found")
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
        """Return the run of this name; None if there is none."""
        return next((run for run in self.all() if run.name == name), None)


def _newest(paths: Sequence[Path]) -> list[Path]:
    """Keep the runs that changed last, if they are too many for a page, in their order."""
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


LOOK_SECONDS = 1.0
_SHARE_OF_TIME = 0.1  # at most, that looking may take
_READ_SECONDS = 0.5  # of files without an index, between two looks
_ALIVE_SECONDS = 15.0  # between lines that keep a silent connection open


class Following:
    """Looks at the runs while a page is open, and gives each page what changed."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._queues: set[asyncio.Queue[str | None]] = set()
        self._signs: dict[tuple[str, str], Any] = {}
        self._told = ""  # of what went wrong

    async def events(self) -> AsyncIterator[str]:
        """Yield server-sent events until the server stops: `hello`, then a `change` for each run that changed."""
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        self._queues.add(queue)
        try:
            yield _event("hello", {})
            while True:
                try:
                    event = await asyncio.wait_for(queue.get(), _ALIVE_SECONDS)
                except asyncio.TimeoutError:
                    event = ": alive\n\n"
                if event is None:
                    return
                yield event
        finally:
            self._queues.discard(queue)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follow the runs inside."""
        task = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            task.cancel()
            self.stop()

    def stop(self) -> None:
        """End the connections of all pages."""
        self._tell(None)

    def _tell(self, event: str | None) -> None:
        for queue in self._queues:
            queue.put_nowait(event)

    async def _follow(self) -> None:
        await self._attempted(self._look_ahead)
        while True:
            started = time.monotonic()
            for event in await self._attempted(self._look) if self._queues else []:
                self._tell(event)
            took = time.monotonic() - started
            is_reading = self._queues and any(run.groups.unread for run in self._runs.all())
            await asyncio.sleep(max(LOOK_SECONDS, 0.1 if is_reading else took * (1 / _SHARE_OF_TIME - 1)))

    async def _attempted(self, look: Callable[[], list[str]]) -> list[str]:
        """Look in a thread. What nobody foresaw is printed once, and the pages wait for the next look."""
        try:
            return await asyncio.to_thread(look)
        except Exception as error:
            if repr(error) != self._told:
                self._told = repr(error)
                print(redact(traceback.format_exc()), file=sys.stderr, flush=True)
            return []

    def _look_ahead(self) -> list[str]:
        """Read what the first page that opens will ask for."""
        for run in self._runs.all()[:1]:
            with suppress(OSError):
                run.overview()
                run.known_groups()
        return self._look()

    def _look(self) -> list[str]:
        events = [_event("change", {"run": None, "kinds": ["runs"]})] if self._runs.refresh() else []
        for run in self._runs.all():
            try:
                signs = run.signs()
                kinds = [kind for kind, sign in signs.items() if self._signs.get((run.name, kind)) != sign]
                self._signs |= {(run.name, kind): sign for kind, sign in signs.items()}
                if run.has_readers and ("groups" in kinds or run.groups.unread):
                    run.groups.refresh()
                if run.groups.unread:
                    run.groups.read_unread(_READ_SECONDS)
                    kinds = [*dict.fromkeys([*kinds, "groups"])]
            except (OSError, ValueError, LookupError, TypeError):  # one run that cannot be read must not hide others
                continue
            if kinds:
                events.append(_event("change", {"run": run.name, "kinds": kinds}))
        return events


def _event(name: str, value: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(value)}\n\n"
