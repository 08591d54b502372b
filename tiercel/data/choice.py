"""Choose rows where not all are taken: those whose ids have the smallest hashes, a choice of no seed or file."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Literal

from tiercel.types import RejectedRow, Row

# What the rows are chosen for. Two choices among the same rows are independent.
Use = Literal["part of a file", "held out"]


def chosen(rows: Sequence[Row | RejectedRow], count: int, use: Use) -> frozenset[int]:
    """Positions of `count` of the rows. Rows of equal id, of different files, are chosen together or not at all, but
    where the count ends between them; then file name and line decide."""

    def rank(position: int) -> tuple[bytes, str, int]:
        row = rows[position]
        return sha256(f"{use}\n{row.id}".encode()).digest(), row.file, row.line

    return frozenset(sorted(range(len(rows)), key=rank)[:count])
