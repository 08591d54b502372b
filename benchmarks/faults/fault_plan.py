"""A plan of faults: which kind, at which site, in which step, on which rank.

`TIERCEL_FAULT_PLAN` contains a JSON list such as [{"step": 3, "site": "learn", "rank": 1, "kind": "sleep"}]. A process
with CUSTOMIZE on its PYTHONPATH reads the plan at its start, and so do its children. Sites are the phases of a step and
the names in the calls of `Heartbeat.maybe_fail` and `Heartbeat.maybe_corrupt`. Each fault happens once in a process.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from tiercel.reliability import faults

VARIABLE = "TIERCEL_FAULT_PLAN"
CUSTOMIZE = Path(__file__).parent / "customize"
Kind = Literal["sleep", "kill", "term", "stop", "exit", "skip", "nan", "inf"]
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
VALUES = {"nan": float("nan"), "inf": float("inf")}
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A planned fault. `step` is the number of updates done before; None means any."""

    site: str
    kind: Kind
    step: int | None = None
    rank: int = 0


class FaultPlan:
    """The faults of a process that have not happened yet."""

    def __init__(self, planned: Sequence[Fault]):
        self._waiting = list(planned)

    def maybe_fail(self, site: str, step: int, rank: int) -> bool:
        kind = self._take(site, step, rank, ("sleep", *SIGNALS, "exit", "skip"))
        if kind is None:
            return False
        print(f"fault plan: {kind} at {site}, step {step}, rank {rank}", file=sys.stderr, flush=True)
        if kind == "sleep":
            time.sleep(1e6)
        elif kind in SIGNALS:
            os.kill(os.getpid(), SIGNALS[kind])
        elif kind == "exit":
            os._exit(1)
        return kind == "skip"

    def maybe_corrupt(self, value: T, site: str, step: int, rank: int) -> T:
        kind = self._take(site, step, rank, tuple(VALUES))
        return value if kind is None else value * VALUES[kind]  # type: ignore[operator, return-value]

    def _take(self, site: str, step: int, rank: int, kinds: tuple[str, ...]) -> str | None:
        for fault in self._waiting:
            if fault.site == site and fault.rank == rank and fault.step in (None, step) and fault.kind in kinds:
                self._waiting.remove(fault)
                return fault.kind
        return None


@contextmanager
def planning(planned: Sequence[Fault]) -> Iterator[None]:
    """Use these faults in this process inside the context."""
    before = faults.put(FaultPlan(planned))
    try:
        yield
    finally:
        faults.put(before)


def put_planned() -> None:
    """Read the plan from the environment."""
    if text := os.environ.get(VARIABLE):
        faults.put(FaultPlan([Fault(**entry) for entry in json.loads(text)]))


def with_plan(plan: str) -> dict[str, str]:
    """Return the variables of a process that is to have a plan."""
    root = CUSTOMIZE.parents[2]
    paths = [str(CUSTOMIZE), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {VARIABLE: plan, "PYTHONPATH": os.pathsep.join(paths)}
