"""Following runs by the sizes and times of their files, which works on shared file systems, and telling open pages."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from tiercel.view.parts import overview
from tiercel.view.runs import Runs

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
        self._task: asyncio.Task | None = None

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
        self._task = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            self._task.cancel()
            self.stop()

    def stop(self) -> None:
        """End the connections of all pages."""
        self._tell(None)

    def _tell(self, event: str | None) -> None:
        for queue in self._queues:
            queue.put_nowait(event)

    async def _follow(self) -> None:
        await asyncio.to_thread(self._look_ahead)
        while True:
            started = time.monotonic()
            events = await asyncio.to_thread(self._look) if self._queues else []
            for event in events:
                self._tell(event)
            took = time.monotonic() - started
            await asyncio.sleep(max(LOOK_SECONDS, took * (1 / _SHARE_OF_TIME - 1) if not self._is_reading() else 0.1))

    def _look_ahead(self) -> None:
        """Read what the first page that opens will ask for."""
        for run in self._runs.all()[:1]:
            with suppress(OSError):
                run.drawn(overview)
                run.known_groups()
        self._look()

    def _is_reading(self) -> bool:
        return bool(self._queues) and any(run.groups.unread for run in self._runs.all())

    def _look(self) -> list[str]:
        events = [_event("change", {"run": None, "kinds": ["runs"]})] if self._runs.refresh() else []
        for run in self._runs.all():
            signs = run.signs()
            kinds = [kind for kind, sign in signs.items() if self._signs.get((run.name, kind)) != sign]
            self._signs |= {(run.name, kind): sign for kind, sign in signs.items()}
            try:
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
