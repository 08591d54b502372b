"""The file of results: a row for each cell, written as soon as it is available."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import markdown, summary
from tiercel.runs.files import write_atomically

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """Rows by part and cell, and the file that contains them."""

    file: Path
    rows: dict[tuple[str, str], Row] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> "Results":
        """Read the rows of a file. There are none if it does not exist yet."""
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
        return cls(file=file, rows={(row["part"], row["cell"]): row for row in rows})

    def is_there(self, part: str, cell: str, stamp: Row) -> bool:
        """Return whether a cell has a row of the same card and commit. One that was started and did not end counts,
        because it would not end again."""
        row = self.rows.get((part, cell))
        return row is not None and all(row[key] == stamp[key] for key in ("card", "commit"))

    def put(self, row: Row) -> None:
        """Replace a cell's row, and write the file and its tables."""
        self.rows[row["part"], row["cell"]] = row
        rows = sorted(self.rows.values(), key=lambda each: each["part"])
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.file, json.dumps({"rows": rows}, indent=1) + "\n")
        write_atomically(self.file.with_suffix(".md"), markdown(rows))
        write_atomically(self.file.with_name(f"{self.file.stem}_summary.md"), summary(rows))
