"""Choose rows where not all are taken: those whose ids have the smallest hashes, a choice of no seed or file."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Literal

from tiercel.types import RejectedRow, Row

# What the rows are chosen for. Two choices among the same rows are independent.
Use = Literal["part of a file", "held out"]


def chosen(rows: Sequence[Row | RejectedRow], count: int, use: Use) -> frozenset[int]:
    """Positions of `count` of the rows. Rows of equal id, of different files, and rows of one record, such as several
    expressions of one box, are chosen together or not at all, but where the count ends between them."""
    first_ids: dict[tuple[str, int], str] = {}  # of each record
    for row in rows:
        first_ids.setdefault((row.file, row.line), row.id)

    def rank(position: int) -> tuple[bytes, str, int, int]:
        row = rows[position]
        digest = sha256(f"{use}\n{first_ids[row.file, row.line]}".encode()).digest()
        return digest, row.file, row.line, position

    return frozenset(sorted(range(len(rows)), key=rank)[:count])
