"""The figure of a fault: how many of its cases ended as they must."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Size = Literal["short", "full"]
Outcome = tuple[str, str | None]  # a case, and what went wrong with it

SHOWN_FAILURES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One line of the table. `figures` are further numbers, each with its unit in its name."""

    fault: str
    passed: int
    attempted: int
    seed: int
    seconds: float
    figures: Mapping[str, float]
    failures: tuple[str, ...]  # the first few, in words


def figure_of(
    fault: str,
    outcomes: Sequence[Outcome],
    *,
    seed: int,
    seconds: float,
    figures: Mapping[str, float] | None = None,
) -> Figure:
    """Count the outcomes."""
    failures = [f"{case}: {problem}" for case, problem in outcomes if problem is not None]
    return Figure(
        fault=fault,
        passed=len(outcomes) - len(failures),
        attempted=len(outcomes),
        seed=seed,
        seconds=seconds,
        figures=figures or {},
        failures=tuple(failures[:SHOWN_FAILURES]),
    )
