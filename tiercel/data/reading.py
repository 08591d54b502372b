"""Row files to rows: what cannot be used is rejected, recorded and counted."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from tiercel.config.schema import Data
from tiercel.data.formats import FormatName, default_id, detect_format, expanded, parse_record
from tiercel.data.images import open_header
from tiercel.data.order import RowOrder
from tiercel.data.readers import Record, records_of
from tiercel.data.rows import Purpose, Reading, shortened
from tiercel.errors import DataError, RunError
from tiercel.reliability.redaction import redact_values
from tiercel.types import ImageRoots, RejectedRow, Row

_DETECTION_ROWS = 64
_REASONS_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTable:
    """A row file as read: every row of it is in `rows` or in `rejected`."""

    file: str
    format: str
    rows: tuple[Row, ...]
    rejected: tuple[RejectedRow, ...]
    total: int
    counts: tuple[int, ...]  # rows of each file
    weights: tuple[float, ...] = (1.0,)

    def order(self, seed: int, shuffle: bool) -> RowOrder:
        """Which row comes when."""
        return RowOrder(counts=self.counts, weights=self.weights, seed=seed, shuffle=shuffle)

    def identity(self) -> dict[str, Any]:
        """Which rows these are, for JSON: usable ones by file, and a hash of their places and ids. Equal identities
        have equal orders."""
        places = "\n".join(f"{row.line}:{row.id}" for row in self.rows)
        return {"counts": list(self.counts), "sha256": hashlib.sha256(places.encode()).hexdigest()}


def read_training_rows(config: Data, purpose: Purpose, beat: Callable[[], None] = lambda: None) -> RowTable:
    """The rows of data.train and data.mix, file after file. Raises as `read_rows`."""
    tables = [read_rows(config.train, config, purpose, beat)]
    for more in config.mix:
        own = {"format": more.format or config.format, "image_root": more.image_root or config.image_root}
        tables.append(read_rows(more.path, config.model_copy(update=own), purpose, beat))
    if len(tables) == 1:
        return tables[0]
    return RowTable(
        file=", ".join(table.file for table in tables),
        format=", ".join(dict.fromkeys(table.format for table in tables)),
        rows=tuple(row for table in tables for row in table.rows),
        rejected=tuple(row for table in tables for row in table.rejected),
        total=sum(table.total for table in tables),
        counts=tuple(len(table.rows) for table in tables),
        weights=(1.0, *(more.weight for more in config.mix)),
    )


def read_rows(path: str | Path, config: Data, purpose: Purpose, beat: Callable[[], None] = lambda: None) -> RowTable:
    """Every row of a file or directory, in its order. `beat` hears of each.

    Raises DataError where the file is missing, empty, of no known format or has no usable row at all, and
    EnvironmentProblem where it needs pyarrow, which is not there. Rejected rows do not raise: record them with
    `write_bad_rows`, then call `require_few_bad`.
    """
    file = Path(path)
    roots = image_roots(path, config)
    try:
        records = records_of(file)
        first = list(islice(records, _DETECTION_ROWS))
        if not first:
            raise DataError(f"{file}: the file has no rows")
        format = _format(first, config, str(file))
        reading = Reading(
            file=str(file),
            purpose=purpose,
            image_roots=roots,
            image_size=partial(open_header, roots=roots, max_pixels=config.max_image_pixels),
            prompt=config.prompt,
            last_turn_only=purpose == "sft" and config.train_turns == "last",
        )
        if format == "refcoco" and config.prompt is None:
            raise DataError(
                f"{file}: its rows are referring expressions, which need wording; write data.prompt, such as "
                '"Where is {prompt}? Answer with its box."'
            )
        rows, rejected = _parsed(chain(first, records), format, reading, beat)
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error
    if not rows:
        raise DataError(
            f"{file}: none of its {len(rejected)} rows can be used as {format} rows for {purpose}:\n"
            + first_reasons(rejected)
        )
    return RowTable(
        file=str(file),
        format=format,
        rows=tuple(rows),
        rejected=tuple(rejected),
        total=len(rows) + len(rejected),
        counts=(len(rows),),
    )


def image_roots(path: str | Path, config: Data) -> ImageRoots:
    """Where images of a row file may lie. Raises DataError where data.image_root is no directory."""
    if config.image_root is None:
        base = Path(path) if Path(path).is_dir() else Path(path).parent
    else:
        base = Path(config.image_root)
        if not base.is_dir():
            raise DataError(f"data.image_root: {base} is no directory; images resolve under it")
    return ImageRoots(base=str(base), more=config.image_roots)


def write_bad_rows(rejected: Iterable[RejectedRow], path: str | Path) -> None:
    """Append rejected rows to a JSON Lines file, each only once however often a run resumes. Raises RunError."""
    records = [
        {"id": row.id, "file": row.file, "line": row.line, "field": row.field, "reason": row.reason} for row in rejected
    ]
    lines = [json.dumps(record) for record in redact_values(records)]
    file = Path(path)
    try:
        recorded = file.read_text(encoding="utf-8") if file.exists() else ""
        known = set(recorded.splitlines())
        new = [line for line in dict.fromkeys(lines) if line not in known]
        if not new:
            return
        # A line that a killed run left half written stays apart from the next.
        opening = "" if recorded == "" or recorded.endswith("\n") else "\n"
        with file.open("a", encoding="utf-8") as stream:
            stream.write(opening + "\n".join(new) + "\n")
    except OSError as error:
        raise RunError(f"{file}: rejected rows cannot be recorded: {error.strerror or error}") from error


def write_fix_report(rejected: Sequence[RejectedRow], path: str | Path) -> int:
    """Rejected rows as JSON Lines: file, line, field, reason, and the record as it was read, pictures' bytes left out.
    Their number. Raises RunError."""
    wanted = {(row.file, row.line) for row in rejected}
    records = {
        (file, record.line): record.value
        for file in sorted({file for file, _ in wanted})
        for record in records_of(Path(file))
        if (file, record.line) in wanted
    }
    try:
        with Path(path).open("w", encoding="utf-8") as stream:
            for row in rejected:
                found = {"file": row.file, "line": row.line, "id": row.id, "field": row.field, "reason": row.reason}
                stream.write(_fix_line(found, records.get((row.file, row.line))))
    except OSError as error:
        raise RunError(f"{path}: rejected rows cannot be written: {error.strerror or error}") from error
    return len(rejected)


def _fix_line(found: dict[str, object], record: object) -> str:
    try:
        return json.dumps(redact_values({**found, "row": record}), default=_shown) + "\n"
    except RecursionError:
        return json.dumps(redact_values({**found, "row": "(nested too deeply)"})) + "\n"


def _shown(value: object) -> str:
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else str(value)


def require_few_bad(rejected_count: int, total: int, config: Data, rejected: Sequence[RejectedRow]) -> None:
    """Raise DataError where more than data.max_bad_fraction of the rows were rejected, with the first reasons."""
    if total and rejected_count / total > config.max_bad_fraction:
        raise DataError(
            f"{rejected_count} of {total} rows were rejected, more than data.max_bad_fraction = "
            f"{config.max_bad_fraction:g} allows; mend them or raise it. The first:\n{first_reasons(rejected)}"
        )


def first_reasons(rejected: Sequence[RejectedRow]) -> str:
    """The first few rejected rows, one indented line each."""
    lines = [f"  {row.file}:{row.line} ({row.id}) {row.field}: {row.reason}" for row in rejected[:_REASONS_SHOWN]]
    if len(rejected) > _REASONS_SHOWN:
        lines.append(f"  and {len(rejected) - _REASONS_SHOWN} more")
    return "\n".join(lines)


def _format(head: Sequence[Record], config: Data, file: str) -> FormatName:
    if config.format != "auto":
        return config.format
    readable = [record.value for record in head if record.problem is None]
    if not readable:
        raise DataError(f"{file}: none of its first {len(head)} rows is a JSON object; line 1: {head[0].problem}")
    return detect_format(readable, file)


def _parsed(
    records: Iterable[Record], format: FormatName, reading: Reading, beat: Callable[[], None]
) -> tuple[list[Row], list[RejectedRow]]:
    rows: list[Row] = []
    rejected: list[RejectedRow] = []
    line_of_id: dict[str, int] = {}
    for record in records:
        beat()
        default = default_id(reading.file, record.line)
        if record.problem is not None:
            rejected.append(
                RejectedRow(id=default, file=reading.file, line=record.line, field="row", reason=record.problem)
            )
            continue
        values = expanded(format, record.value)
        for number, value in enumerate(values, start=1):
            name = default if len(values) == 1 else f"{default}#{number}"
            row = parse_record(value, format=format, line=record.line, reading=reading, default=name)
            if isinstance(row, RejectedRow):
                rejected.append(row)
            elif row.id in line_of_id:
                reason = f"{shortened(row.id)!r} is the id of line {line_of_id[row.id]} already"
                rejected.append(RejectedRow(id=row.id, file=reading.file, line=row.line, field="id", reason=reason))
            else:
                line_of_id[row.id] = row.line
                rows.append(row)
    return rows, rejected
