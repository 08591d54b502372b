"""The table of cards that can run the learner's attention, kernels.json, as `make gpu-compile` found it: a row for each
card, head size and dtype. This module does not need torch, so that `doctor` can read the table."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("kernels.json")
Capability = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelFit:
    """What the kernels for heads of one size and dtype need on a card. `problem` says why they cannot be compiled, and
    is empty if they can."""

    card: str
    capability: Capability
    head_size: int
    dtype: str
    problem: str
    stack_bytes: tuple[int, int]  # per thread, spilled by the forward and the backward pass


def read_fits(file: Path = FILE) -> tuple[KernelFit, ...]:
    """Read the rows of a table, or none if the file does not exist."""
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"rows": []}
    return tuple(_fit(row) for row in content["rows"])


@cache
def known_fits() -> tuple[KernelFit, ...]:
    """Return the rows of tiercel's own table."""
    return read_fits()


def fit_of(fits: Sequence[KernelFit], capability: Capability, head_size: int, dtype: str) -> KernelFit | None:
    """Return a card's row for heads of this size or the next larger one in the table, or None if there is none."""
    found = [fit for fit in fits if (fit.capability, fit.dtype) == (capability, dtype) and fit.head_size >= head_size]
    return min(found, key=lambda fit: fit.head_size, default=None)


def _fit(row: Mapping[str, Any]) -> KernelFit:
    forward, backward = (row.get(part, {}).get("stack_bytes", 0) for part in ("forward", "backward"))
    return KernelFit(
        card=row["card"],
        capability=(row["capability"][0], row["capability"][1]),
        head_size=row["head_size"],
        dtype=row["dtype"],
        problem=row["problem"],
        stack_bytes=(forward, backward),
    )
