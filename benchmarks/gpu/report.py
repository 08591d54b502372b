"""Tables of the results."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.tables import markdown_table

Row = Mapping[str, Any]
NOT_MEASURED = "not measured on a GPU yet"
STATES = {"begun": "did not end", "failed": "failed", "absent": "not here"}


def markdown(rows: Sequence[Row]) -> str:
    """Return a table for each part that has rows, after a line with the card."""
    cards = sorted({f"{row['card']} (torch {row['versions']['torch']}, {row['commit']})" for row in rows})
    parts = [(part, [row for row in rows if row["part"] == part]) for part in TABLES]
    tables = [_table(part, mine) for part, mine in parts if mine]
    return "\n".join([f"Measured on {'; '.join(cards)}.\n", *tables])


def summary(rows: Sequence[Row]) -> str:
    """Return the README's table: what was measured on a card, and the result."""
    measured = [(what, _first(rows, *where)) for what, where in SUMMARY]
    return markdown_table(("on one GPU", "measured"), [("checks against slow computations", _checks(rows)), *measured])


def _table(part: str, rows: Sequence[Row]) -> str:
    header, line = TABLES[part]
    return markdown_table(("cell", *header), [(row["cell"], *_cells(row, len(header), line)) for row in rows])


def _cells(row: Row, width: int, line: Any) -> tuple[str, ...]:
    if row["state"] != "done":
        reason = f": {row['reason']}".replace("|", "/") if "reason" in row else ""
        return (STATES[row["state"]] + reason, *["-"] * (width - 1))
    result = row["result"]
    if "error" in result and isinstance(result["error"], str):
        return (result["error"], *["-"] * (width - 1))
    if "verdict" in result:
        checked = (result["verdict"], f"{result['error']:.2g}", f"{result['limit']:g}")
        return (*checked, *["-"] * width)[:width]
    return tuple(line(result))


def _learner(result: Row) -> Iterator[str]:
    yield spread_of(result["seconds"])
    yield gibibytes(result["peak_bytes"])
    yield share_of(result["mfu"])


def _decoding(result: Row) -> Iterator[str]:
    yield spread_of(result["step_seconds"])
    yield f"{result['tokens_per_second']:,.0f}"
    yield share_of(result["floor_share"])
    yield f"{result['start_seconds']['median']:.2g} s"


def _whole_step(result: Row) -> Iterator[str]:
    yield ", ".join(f"{phase} {value:.3g}" for phase, value in result["seconds"].items())
    yield f"{result['total_seconds']:.3g} s"
    said = f" (extrapolated from {result['run_groups']} prompts)" if result["is_extrapolated"] else ""
    yield f"{result['extrapolated_seconds']:.4g} s{said}"
    yield gibibytes(result["peak_bytes"])


def spread_of(value: Row) -> str:
    return f"{value['median']:.3g} s ({value['min']:.3g} to {value['max']:.3g})"


def share_of(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def gibibytes(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**30:.1f}"


def _checked(result: Row) -> Iterator[str]:
    raise AssertionError("a check has a verdict")


CHECKS = ("verdict", "error", "limit")
UPDATES = ("step", "peak, GiB", "MFU")
TABLES: dict[str, tuple[tuple[str, ...], Any]] = {
    "a": (CHECKS, _checked),
    "b": (CHECKS, _checked),
    "c": (UPDATES, _learner),
    "d": (("a token's step", "tokens/s", "share of the bandwidth floor", "start"), _decoding),
    "e": (("seconds by phase", "run", "whole step", "peak, GiB"), _whole_step),
    "f": (UPDATES, _learner),
}
SUMMARY = (
    ("7B, 1180 + 8 x 200 tokens, 8 groups: tiercel's learner", ("c", "7b, large image, tiercel")),
    ("the same by plain transformers, checkpointed", ("c", "7b, large image, plain, full checkpointing")),
    ("the same by TRL, checkpointed", ("c", "7b, large image, TRL, full checkpointing")),
    ("7B, decoding of 8 x 8 rows", ("d", "7b, 8 prompts x 8")),
    ("7B, whole step of 8 prompts x 8 completions of 200 tokens", ("e", "7b, 8 prompts x 8, 952 x 952, 200 tokens")),
    ("3B, whole step in the shape of geometry3k, 512 tokens each", ("e", "3b, geometry3k, 512 tokens")),
)


def _checks(rows: Sequence[Row]) -> str:
    """Return how many checks of part a are within their limits."""
    mine = [row for row in rows if row["part"] == "a" and row["state"] != "absent"]
    if not mine:
        return NOT_MEASURED
    equal = [row for row in mine if row["state"] == "done" and row["result"]["verdict"] == "equal"]
    return f"{len(equal)} of {len(mine)} within their limits ({mine[0]['card']})"


def _first(rows: Sequence[Row], part: str, cell: str) -> str:
    """Return what the row of a cell measured, and on which card, in one line."""
    found = next((row for row in rows if (row["part"], row["cell"]) == (part, cell)), None)
    if found is None:
        return NOT_MEASURED
    header, line = TABLES[part]
    cells = _cells(found, len(header), line)
    told = ", ".join(f"{name} {value}" for name, value in zip(header, cells, strict=True) if value != "-")
    return f"{told} ({found['card']})"
