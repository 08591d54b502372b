"""Row files to rows: JSON Lines, a JSON list, or Parquet. What cannot be used is rejected, recorded and counted."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NoReturn

from tiercel.config.schema import Data
from tiercel.data.formats import FormatName, default_id, detect_format, parse_record
from tiercel.data.images import open_header
from tiercel.data.rows import Purpose, shortened
from tiercel.errors import DataError, EnvironmentProblem, RunError
from tiercel.reliability.redaction import redact_values
from tiercel.types import RejectedRow, Row

_DETECTION_ROWS = 64
_REASONS_SHOWN = 5
_PARQUET_ROWS = 256  # read at once; rows with embedded images are large


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTable:
    """A row file as read: every row of it is in `rows` or in `rejected`."""

    file: str
    format: FormatName
    rows: tuple[Row, ...]
    rejected: tuple[RejectedRow, ...]
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    """One object of a file, or the reason why it is none."""

    line: int
    value: dict[str, Any]
    problem: str | None = None


def read_rows(path: str | Path, config: Data, purpose: Purpose, beat: Callable[[], None] = lambda: None) -> RowTable:
    """Every row of a .jsonl, .json or .parquet file, in the file's order. `beat` hears of each.

    Raises DataError where the file is missing, empty, of no known format or has no usable row at all, and
    EnvironmentProblem where Parquet is asked for without pyarrow. Rejected rows do not raise: record them with
    `write_bad_rows`, then call `require_few_bad`.
    """
    file = Path(path)
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        raise DataError(f"{file}: rows are read from {', '.join(_READERS)} files, not {file.suffix or 'this'}")
    root = image_root(path, config)
    try:
        records = reader(file)
        head = list(islice(records, _DETECTION_ROWS))
        if not head:
            raise DataError(f"{file}: the file has no rows")
        format = _format(head, config, str(file))
        parse = partial(
            parse_record,
            format=format,
            file=str(file),
            purpose=purpose,
            image_size=partial(open_header, root=root, max_pixels=config.max_image_pixels),
        )
        rows, rejected = _parsed(chain(head, records), parse, str(file), beat)
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
    )


def image_root(path: str | Path, config: Data) -> Path:
    """The directory that images of a row file resolve under. Raises DataError where there is none."""
    if config.image_root is None:
        return Path(path).parent
    root = Path(config.image_root)
    if not root.is_dir():
        raise DataError(f"data.image_root: {root} is no directory; images resolve under it")
    return root


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


def _format(head: Sequence[_Record], config: Data, file: str) -> FormatName:
    if config.format != "auto":
        return config.format
    readable = [record.value for record in head if record.problem is None]
    if not readable:
        raise DataError(f"{file}: none of its first {len(head)} rows is a JSON object; line 1: {head[0].problem}")
    return detect_format(readable, file)


def _parsed(
    records: Iterable[_Record], parse: Callable[..., Row | RejectedRow], file: str, beat: Callable[[], None]
) -> tuple[list[Row], list[RejectedRow]]:
    rows: list[Row] = []
    rejected: list[RejectedRow] = []
    line_of_id: dict[str, int] = {}
    for record in records:
        beat()
        if record.problem is not None:
            id = default_id(file, record.line)
            rejected.append(RejectedRow(id=id, file=file, line=record.line, field="row", reason=record.problem))
            continue
        row = parse(record.value, line=record.line)
        if isinstance(row, RejectedRow):
            rejected.append(row)
        elif row.id in line_of_id:
            reason = f"{shortened(row.id)!r} is the id of line {line_of_id[row.id]} already"
            rejected.append(RejectedRow(id=row.id, file=file, line=row.line, field="id", reason=reason))
        else:
            line_of_id[row.id] = row.line
            rows.append(row)
    return rows, rejected


def _read_json_lines(file: Path) -> Iterator[_Record]:
    with file.open("rb") as stream:
        for line, data in enumerate(stream, start=1):
            if line == 1:
                _refuse_utf16(data, file)
                data = data.removeprefix(b"\xef\xbb\xbf")
            if data.strip():
                yield _record(data, line)


def _read_json_list(file: Path) -> Iterator[_Record]:
    data = file.read_bytes()
    _refuse_utf16(data, file)
    if not data.strip():
        return
    try:
        values = _loads(data.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: {_json_problem(error)}. A file with one object a line is named .jsonl") from error
    if not isinstance(values, list):
        raise DataError(f"{file}: holds a JSON {_kind(values)}; a .json file holds a list of rows")
    for number, value in enumerate(values, start=1):
        yield _object(value, number)


def _read_parquet(file: Path) -> Iterator[_Record]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise EnvironmentProblem(
            f"{file}: Parquet needs a package that is not installed: pip install pyarrow"
        ) from error
    try:
        with parquet.ParquetFile(file) as table:
            numbered = enumerate(chain.from_iterable(b.to_pylist() for b in table.iter_batches(_PARQUET_ROWS)), start=1)
            for number, value in numbered:
                yield _Record(line=number, value=value)
    except pyarrow.ArrowException as error:
        raise DataError(f"{file}: is no readable Parquet file: {error}") from error


_READERS: dict[str, Callable[[Path], Iterator[_Record]]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json_list,
    ".parquet": _read_parquet,
}


def _record(data: bytes, line: int) -> _Record:
    try:
        return _object(_loads(data), line)
    except (ValueError, RecursionError) as error:
        return _Record(line=line, value={}, problem=_json_problem(error))


def _object(value: Any, line: int) -> _Record:
    if isinstance(value, dict):
        return _Record(line=line, value=value)
    return _Record(line=line, value={}, problem=f"is a JSON {_kind(value)}; a row is an object")


def _loads(data: bytes) -> Any:
    return json.loads(data.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is beyond the range of numbers")
    return value


def _json_problem(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 (byte {error.start} of the row)"
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    return f"is not valid JSON: {error}"


def _refuse_utf16(data: bytes, file: Path) -> None:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{file}: is encoded in UTF-16; save it as UTF-8")


def _kind(value: Any) -> str:
    kinds = {list: "list", dict: "object", str: "text", bool: "boolean", int: "number", float: "number"}
    return kinds.get(type(value), "null")
