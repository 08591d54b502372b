"""Choose some of the rows: those whose ids have the smallest hashes. The choice depends on no seed and no file name."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Literal

from tiercel.types import RejectedRow, Row

# The purpose of a choice. Choices from the same rows for two purposes are independent.
Use = Literal["part of a file", "held out"]


def chosen(rows: Sequence[Row | RejectedRow], count: int, use: Use) -> frozenset[int]:
    """Return the positions of `count` of the rows. Rows of several files with the same id, and rows of one record (such
    as several expressions of one box), are chosen together, unless the count ends between them."""
    first_ids: dict[tuple[str, int], str] = {}  # id of each record's first row
    for row in rows:
        first_ids.setdefault((row.file, row.line), row.id)

    def rank(position: int) -> tuple[bytes, str, int, int]:
        row = rows[position]
        digest = sha256(f"{use}\n{first_ids[row.file, row.line]}".encode()).digest()
        return digest, row.file, row.line, position

    return frozenset(sorted(range(len(rows)), key=rank)[:count])
