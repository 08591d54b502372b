"""Which cards can run the learner's attention, as `make gpu-compile` found: kernels.json, a row for each card, size of
heads and dtype. It needs no torch, so that `doctor` can read it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("kernels.json")
Capability = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """What the kernels of heads of one size and dtype need on a card. `problem`: why they cannot be compiled, empty
    where they can."""

    card: str
    capability: Capability
    head_size: int
    dtype: str
    problem: str
    stack_bytes: tuple[int, int]  # of a thread, spilled by the forward and the backward pass


def read_fits(file: Path = FILE) -> tuple[Fit, ...]:
    """Read the rows of a table; none where there is no file."""
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"rows": []}
    return tuple(_fit(row) for row in content["rows"])


@cache
def known_fits() -> tuple[Fit, ...]:
    """Return the rows of tiercel's own table."""
    return read_fits()


def fit_of(fits: Sequence[Fit], capability: Capability, head_size: int, dtype: str) -> Fit | None:
    """Find the row of a card for heads of this size or the next larger one in the table; None where it has none."""
    found = [fit for fit in fits if (fit.capability, fit.dtype) == (capability, dtype) and fit.head_size >= head_size]
    return min(found, key=lambda fit: fit.head_size, default=None)


def _fit(row: Mapping[str, Any]) -> Fit:
    forward, backward = (row.get(part, {}).get("stack_bytes", 0) for part in ("forward", "backward"))
    return Fit(
        card=row["card"],
        capability=(row["capability"][0], row["capability"][1]),
        head_size=row["head_size"],
        dtype=row["dtype"],
        problem=row["problem"],
        stack_bytes=(forward, backward),
    )
