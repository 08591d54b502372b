"""Canaries in every slot that something could be loaded from: none fires, and each is refused or never opened."""

import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.faults.canary_slots import SLOTS, Workplace, make_workplace
from benchmarks.faults.child import Send, collect
from benchmarks.faults.figure import Figure, Outcome, Size, figure_of
from tiercel.errors import TiercelError

SECONDS = 200.0
# What a payload would do first, counted by an audit hook.
EVENTS = frozenset({"pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen"})


def canaries(size: Size, seed: int, work_dir: Path) -> Figure:
    """Try every slot in one child process. A short run leaves out every second case, depending on the seed."""
    started = time.perf_counter()
    place = make_workplace(work_dir)

    def work(send: Send) -> None:
        events = Counter[str]()
        sys.addaudithook(lambda event, arguments: _count(events, event))
        for name, slot in SLOTS.items():
            for number, (case, attempt) in enumerate(slot(place, work_dir / "slots" / name.replace(" ", "-"))):
                if size == "short" and number % 2 == seed % 2:
                    continue
                events.clear()
                problem = _problem(attempt, place, events)
                send((f"{name}: {case}", problem))

    outcomes: list[Outcome]
    outcomes, end = collect(work, SECONDS)
    if end is not None:
        outcomes.append((f"the process, after {outcomes[-1][0] if outcomes else 'nothing'}", end))
    return figure_of(
        "pickle canaries in every loadable slot",
        outcomes,
        seed=seed,
        seconds=time.perf_counter() - started,
        figures={"slots": len(SLOTS)},
    )


def _count(events: Counter[str], event: str) -> None:
    """Count an event in an audit hook, which cannot be removed and ends with its process."""
    if event in EVENTS:
        events[event] += 1


def _problem(attempt: Callable[[], Any], place: Workplace, events: Counter[str]) -> str | None:
    """Require that `attempt` raises a TiercelError, or returns what shows that the canary was never opened."""
    try:
        problem = attempt()
    except TiercelError as error:
        problem = None if len(str(error)) > 20 else f"an error without a reason: {error}"
    except Exception as error:  # a traceback in place of a message
        problem = f"{type(error).__name__}: {error}"
    if place.canary.file.exists():
        place.canary.file.unlink()
        return "the canary fired"
    if events:
        return f"{dict(events)}"
    return problem
