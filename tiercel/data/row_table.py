"""The rows of a recipe: those of one or more files in a table, for training and held out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from tiercel.config.data import Data
from tiercel.data.index import remembered
from tiercel.data.order import RowOrder, clusters_of
from tiercel.data.stores import RowView, joined, view_of
from tiercel.types import RejectedRow, Row

CONTENT = "said"  # key in an identity: the hash of what the rows say


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTable:
    """Holds the rows of one or more files. Each row is either in `rows` or in `rejected`."""

    file: str
    format: str  # as people call it
    rows: Sequence[Row]
    rejected: tuple[RejectedRow, ...]
    counts: tuple[int, ...]  # usable rows of each file
    weights: tuple[float, ...] = (1.0,)
    without: tuple[tuple[str, int], ...] = ()  # columns that data.columns names, and how many rows lack each
    labelled: tuple[str, ...] = ()  # columns with class labels, which are read as their names

    @property
    def total(self) -> int:
        """Return the number of all rows."""
        return len(self.rows) + len(self.rejected)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what a person should know about how the rows were read: which columns only some rows have, and which
        have class labels."""
        return (
            *(f"data.columns: rows without {name}: {count:,}" for name, count in self.without),
            *(f"column {name}: class labels are read as their names, not as numbers" for name in self.labelled),
        )

    def order(self, seed: int, data: Data) -> RowOrder:
        """Return the order of the rows."""
        clusters = None
        if data.group_by_prefix:
            clusters = clusters_of(view_of(self.rows).column("beginning"), data.rows_per_prefix)
        return RowOrder(counts=self.counts, weights=self.weights, seed=seed, shuffle=data.shuffle, clusters=clusters)

    def identity(self, beat: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Describe the rows, for JSON: the number of usable rows of each file, a hash of their lines and ids, and a
        hash of what they say. Tables that differ only in the last have equal orders."""
        rows = view_of(self.rows)
        hashes = remembered(rows, "identity", lambda: _hashes(rows), beat)
        return {"counts": list(self.counts), **hashes}


def _hashes(rows: RowView) -> dict[str, str]:
    places, before = sha256(), ""
    for line, id in zip(rows.column("line"), rows.ids(), strict=True):
        places.update(f"{before}{line}:{id}".encode())
        before = "\n"
    return {"sha256": places.hexdigest(), CONTENT: sha256(rows.column("said").tobytes()).hexdigest()}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRows:
    """Holds the rows of a recipe."""

    train: RowTable
    heldout: RowTable | None  # None if the recipe has no data.eval

    @property
    def tables(self) -> tuple[RowTable, ...]:
        """Return the table of training rows, and that of held-out rows if there is one."""
        return (self.train,) if self.heldout is None else (self.train, self.heldout)

    @property
    def every(self) -> RowView:
        """Return all rows, held-out rows last."""
        return joined([view_of(table.rows) for table in self.tables])
