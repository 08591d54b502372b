"""Cells, run one after the other within a time limit. A failure leaves a row as well."""

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.results import Results
from benchmarks.gpu.setup import Setup, stamp

BEGUN, DONE, FAILED, ABSENT = "begun", "done", "failed", "absent"
EQUAL, DIFFERS = "equal", "differs"  # verdicts of checks
TRACE_LINES = 25


class NotHere(Exception):
    """Raised if a cell needs a package or a recipe key that is not available."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One measurement. `run` returns what goes into its row."""

    part: str
    name: str
    run: Callable[[Setup], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """What a call did not get to, and what went wrong in it."""

    left: tuple[str, ...]
    wrong: tuple[str, ...]


def verdict(error: float, limit: float, what: str) -> dict[str, Any]:
    """Return the row of a check. NaN never passes."""
    return {"what": what, "error": error, "limit": limit, "verdict": EQUAL if error <= limit else DIFFERS}


def run_cells(cells: Sequence[Cell], setup: Setup, results: Results, seconds: float, again: bool = False) -> Ended:
    """Run the cells that have no row yet, until all are done, the seconds are over, or the device is lost."""
    started, mark = time.monotonic(), stamp(setup)
    open_cells = [cell for cell in cells if again or not results.is_there(cell.part, cell.name, mark)]
    wrong = []
    for number, cell in enumerate(open_cells):
        if time.monotonic() - started > seconds:
            return Ended(left=tuple(map(title, open_cells[number:])), wrong=tuple(wrong))
        results.put({"part": cell.part, "cell": cell.name, "state": BEGUN, **mark})
        row = _row(cell, setup, mark)
        results.put(row)
        told = row["reason"] if row["state"] != DONE else row["result"].get("verdict", "")
        print(f"{title(cell)}: {row['state']} in {row['seconds']:.0f} s {told}".rstrip(), flush=True)
        if row["state"] == FAILED or row.get("result", {}).get("verdict") == DIFFERS:
            wrong.append(title(cell))
        if row["state"] == FAILED and not setup.is_alive():
            print("the device no longer answers in this process; run the same command again", flush=True)
            return Ended(left=tuple(map(title, open_cells[number + 1 :])), wrong=tuple(wrong))
        setup.free()
    return Ended(left=(), wrong=tuple(wrong))


def title(cell: Cell) -> str:
    return f"{cell.part}: {cell.name}"


def _row(cell: Cell, setup: Setup, mark: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"part": cell.part, "cell": cell.name}
    setup.free()
    started = time.monotonic()
    try:
        row |= {"state": DONE, "result": dict(cell.run(setup))}
    except NotHere as error:
        row |= {"state": ABSENT, "reason": str(error)}
    except torch.OutOfMemoryError:
        row |= {"state": DONE, "result": {"error": "out of memory"}}
    except Exception as error:  # whatever it is, the other cells are still worth their time
        lines = traceback.format_exc().strip().splitlines()
        first = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        row |= {"state": FAILED, "reason": first, "trace": lines[-TRACE_LINES:]}
    return {**row, "seconds": round(time.monotonic() - started, 1), **mark}
