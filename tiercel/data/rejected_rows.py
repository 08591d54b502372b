"""Record the rows that cannot be used, and end a run that has too many of them."""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from tiercel.config.data import Data
from tiercel.data.readers import records_of
from tiercel.data.remote import parts_of, source_of
from tiercel.data.texts import told
from tiercel.errors import DataError
from tiercel.message_text import counted
from tiercel.regular_files import open_to_append, read_text
from tiercel.reliability.redaction import redact_values
from tiercel.types import RejectedRow
from tiercel.writing import GO_ON, writing

_REASONS_SHOWN = 5


def write_bad_rows(rejected: Iterable[RejectedRow], path: str | Path) -> None:
    """Append rejected rows to a JSON Lines file, each only once however often a run resumes. Raises RunError if it
    cannot be written."""
    lines = [_json(record) for record in redact_values([asdict(row) for row in rejected])]
    file = Path(path)
    with writing(file, GO_ON):
        recorded = read_text(file) if os.path.lexists(file) else ""
        known = set(recorded.split("\n"))
        new = [line for line in dict.fromkeys(lines) if line not in known]
        if not new:
            return
        # A killed run may have left an incomplete line; the next row starts a new one.
        opening = "" if recorded == "" or recorded.endswith("\n") else "\n"
        with open_to_append(file) as stream:
            stream.write(opening + "\n".join(new) + "\n")


def write_fix_report(rejected: Sequence[RejectedRow], path: str | Path, config: Data) -> int:
    """Write rejected rows as JSON Lines: file, line, field, reason, and the record as it was read, without the bytes of
    images, or the beginning of its text. Return their number. Raises RunError if the file cannot be written."""
    wanted = {(row.file, row.line) for row in rejected}
    records = {
        (file, record.line): record.text or record.value
        for file in sorted({file for file, _ in wanted})
        for part in parts_of(source_of(file), config)
        for record in records_of(part)
        if (file, record.line) in wanted
    }
    with writing(Path(path)), Path(path).open("w", encoding="utf-8") as stream:
        for row in rejected:
            found = {"file": row.file, "line": row.line, **asdict(row)}
            stream.write(_fix_line(found, records.get((row.file, row.line))))
    return len(rejected)


def _fix_line(found: dict[str, object], record: object) -> str:
    try:
        return _json(redact_values({**found, "row": record})) + "\n"
    except RecursionError:
        return _json(redact_values({**found, "row": "(nested too deeply)"})) + "\n"


def _json(value: object) -> str:
    """Return a value as JSON, with text unchanged except halves of surrogate pairs, which UTF-8 cannot encode: these
    are escaped."""
    text = json.dumps(value, ensure_ascii=False, default=_shown)
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


def _shown(value: object) -> str:
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else str(value)


def require_few_bad(rejected_count: int, total: int, config: Data, rejected: Sequence[RejectedRow] = ()) -> None:
    """Raise DataError, with the first reasons of `rejected`, if more than data.max_bad_fraction of the rows were
    rejected."""
    if total and rejected_count / total > config.max_bad_fraction:
        reasons = f":\n{first_reasons(rejected)}" if rejected else ""
        rows = counted(total, "row")
        raise DataError(told("many bad rows", rejected_count, rows, config.max_bad_fraction, reasons))


def first_reasons(rejected: Sequence[RejectedRow]) -> str:
    """List the first few rejected rows, one indented line each."""
    lines = [f"  {row.file}:{row.line} ({row.id}) {row.field}: {row.reason}" for row in rejected[:_REASONS_SHOWN]]
    if len(rejected) > _REASONS_SHOWN:
        lines.append(f"  and {len(rejected) - _REASONS_SHOWN} more")
    return "\n".join(lines)
