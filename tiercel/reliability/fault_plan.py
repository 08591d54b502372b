"""Faults on purpose, for trying out what a run does: which kind, at which site, in which step, on which rank.

`TIERCEL_FAULT_PLAN` holds a JSON list such as [{"step": 3, "site": "learn", "rank": 1, "kind": "sleep"}]. Sites are the
phases of a step and the names in the calls of `strike` and `spoil`. Each fault happens once in a process.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

VARIABLE = "TIERCEL_FAULT_PLAN"
Kind = Literal["sleep", "kill", "term", "stop", "exit", "skip", "nan", "inf"]
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
VALUES = {"nan": float("nan"), "inf": float("inf")}
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """`step`: updates done before; None is any."""

    site: str
    kind: Kind
    step: int | None = None
    rank: int = 0


def planned() -> list[Fault]:
    """The faults of this process that have not happened yet."""
    return [Fault(**entry) for entry in json.loads(os.environ.get(VARIABLE, "[]"))]


_waiting = planned()


@contextmanager
def planning(faults: Sequence[Fault]) -> Iterator[None]:
    """Inside, these are the faults of this process."""
    before = list(_waiting)
    _waiting[:] = faults
    try:
        yield
    finally:
        _waiting[:] = before


def strike(site: str, step: int, rank: int) -> bool:
    """Do what the plan has for this moment. True where the caller is to leave out what it was about to do."""
    kind = _take(site, step, rank, ("sleep", *SIGNALS, "exit", "skip"))
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


def spoil(value: T, site: str, step: int, rank: int) -> T:
    """The value, which can be multiplied by a number, or what the plan makes of it."""
    kind = _take(site, step, rank, tuple(VALUES))
    return value if kind is None else value * VALUES[kind]  # type: ignore[operator, return-value]


def _take(site: str, step: int, rank: int, kinds: tuple[str, ...]) -> str | None:
    for fault in _waiting:
        if fault.site == site and fault.rank == rank and fault.step in (None, step) and fault.kind in kinds:
            _waiting.remove(fault)
            return fault.kind
    return None
