"""Read rows from Parquet files and from Arrow files as Hugging Face's datasets writes them."""

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tiercel.data.class_labels import decoded, encoded_columns
from tiercel.data.picture_columns import batch_without_bytes, leaves_without_bytes, with_unread
from tiercel.data.records import Record, json_problem, loads
from tiercel.data.texts import told
from tiercel.errors import DataError, EnvironmentProblem

_NUMBER = re.compile(r"\d+")  # as in 0001 of the hub's own files, or in part-00000-... of Spark
_SHARD = re.compile(r"-\d+-of-\d+(-[0-9a-f]+)?$")  # the end of the name of a file that is one part of a data set
BATCH_ROWS, _BATCH_BYTES = 256, 1 << 22  # read at once; rows with embedded images are large
_STATE, _SPLITS = "state.json", "dataset_dict.json"  # written by save_to_disk for one data set, and for several


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGroup:
    """Names rows that are read from their first one on: a row group of a Parquet file, or all of an Arrow file."""

    file: Path
    rows: int
    number: int | None = None  # of the row group
    batch_rows: int = BATCH_ROWS


def read_groups(path: Path, pictures: Collection[str] = ()) -> Iterator[Record]:
    """Read a Parquet file, or a data set that Hugging Face's datasets wrote: a directory with Arrow files of
    save_to_disk, or with Parquet files of a repository. Raises what `row_groups` raises and, with `pictures`, what
    `records_of_group` does."""
    line = 1
    for group in row_groups(path):
        yield from records_of_group(group, line, pictures)
        line += group.rows


def row_groups(path: Path) -> Iterator[RowGroup]:
    """Yield the row groups of a Parquet file or of a directory, in order. Raises DataError if it cannot be read or is
    not one data set, and EnvironmentProblem if pyarrow is missing."""
    if (path / _STATE).is_file():
        yield from arrow_groups(_arrow_files(path))
        return
    for file in _parquet_files(path) if path.is_dir() else [path]:
        with reading_arrow(file, "a Parquet file") as pyarrow:
            found = pyarrow.parquet.read_metadata(file, memory_map=True)
            groups = [found.row_group(number) for number in range(found.num_row_groups)]
        for number, group in enumerate(groups):
            most = _BATCH_BYTES * group.num_rows // max(group.total_byte_size, 1)
            yield RowGroup(file=file, rows=group.num_rows, number=number, batch_rows=min(max(most, 1), BATCH_ROWS))


def arrow_groups(files: Iterable[Path]) -> Iterator[RowGroup]:
    """Yield each Arrow file as one group. Raises what `batches_of` raises."""
    for file in files:
        yield RowGroup(file=file, rows=sum(batch.num_rows for batch in batches_of(RowGroup(file=file, rows=0))))


def batches_of(group: RowGroup) -> Iterator[Any]:
    """Yield the Arrow batches of a group, each decoded when it is asked for. Raises DataError or OSError if one cannot
    be read."""
    for batch, _ in _batches(group, ()):
        yield batch


def _batches(group: RowGroup, pictures: Collection[str]) -> Iterator[tuple[Any, Collection[str]]]:
    """Yield the batches of a group, each with those of the columns `pictures` that it has without bytes."""
    if group.number is None:
        with reading_arrow(group.file, "a data set") as arrow, arrow.memory_map(str(group.file)) as source:
            for batch in arrow.ipc.open_stream(source):
                yield batch_without_bytes(batch, pictures)
        return
    with (
        reading_arrow(group.file, "a Parquet file") as pyarrow,
        pyarrow.parquet.ParquetFile(group.file, memory_map=True) as table,
    ):
        leaves, left_out = leaves_without_bytes(table, group.number, pictures)
        rows = BATCH_ROWS if left_out else group.batch_rows
        # Without threads, because processes that were forked read too.
        for batch in table.iter_batches(rows, row_groups=[group.number], columns=leaves, use_threads=False):
            yield batch, left_out


def records_of_group(group: RowGroup, line: int, pictures: Collection[str] = ()) -> Iterator[Record]:
    """Yield the rows of a group, whose first is `line`. If the rest of a row group cannot be read, each of its rows is
    a problem. In the columns `pictures`, pictures may have UNREAD in place of their bytes, if these are there; then the
    error is raised, because without them other rows might be lost."""
    read = 0
    try:
        for batch, left_out in _batches(group, pictures):
            for record in _records_of_batch(batch, line + read):
                is_lacking = left_out and record.problem is None
                yield replace(record, value=with_unread(record.value, left_out)) if is_lacking else record
            read += batch.num_rows
    except (DataError, OSError) as error:
        if pictures:
            raise
        problem = unreadable(group, error)
        for number in range(read, group.rows):
            yield Record(line=line + number, problem=problem)


def unreadable(group: RowGroup, error: Exception) -> str:
    """Return why rows of a row group cannot be used. Raises the error for an Arrow file, which does not say how many
    rows it should have."""
    if group.number is None:
        raise error
    return f"row group {group.number} of {group.file} cannot be read: {error}"


def records_of_batches(batches: Iterable[Any]) -> Iterator[Record]:
    line = 1
    for batch in batches:
        yield from _records_of_batch(batch, line)
        line += batch.num_rows


def _records_of_batch(batch: Any, line: int) -> list[Record]:
    """Return the rows of an Arrow batch, whose first is `line`. Text that is not UTF-8, and a date that Python cannot
    represent, only make their own row a problem."""
    try:
        values, encoded = batch.to_pylist(), encoded_columns(batch.schema.metadata)
        values = [decoded(value, encoded, has_json=True) for value in values] if encoded else values
    except (ValueError, OverflowError):
        return [record_at(batch, number, line + number) for number in range(batch.num_rows)]
    return [Record(line=number, value=value) for number, value in enumerate(values, start=line)]


def record_at(batch: Any, number: int, line: int) -> Record:
    """Return a row of an Arrow batch; its problem is why it cannot be read."""
    try:
        (value,) = batch.slice(number, 1).to_pylist()
        return Record(line=line, value=decoded(value, encoded_columns(batch.schema.metadata), has_json=True))
    except (ValueError, OverflowError) as error:
        return Record(line=line, problem=f"has a value that cannot be read: {error}")


def _parquet_files(directory: Path) -> list[Path]:
    if (directory / _SPLITS).is_file():
        splits = _description(directory / _SPLITS).get("splits")
        folders = [str(directory / str(split)) for split in splits] if isinstance(splits, list) else ["its folders"]
        raise DataError(f"{directory}: contains several data sets; name one of {', '.join(folders)}")
    files = sorted([*directory.glob("*.parquet"), *directory.glob("data/*.parquet")])
    if not files:
        raise DataError(told("no data set", directory, _STATE))
    splits = sorted({_NUMBER.sub("N", _SHARD.sub("", file.stem)) for file in files})
    if len(splits) > 1:
        raise DataError(told("several data sets", directory, ", ".join(splits)))
    return files


def _arrow_files(directory: Path) -> list[Path]:
    """Return the files that save_to_disk has listed. Raises DataError if they are not the whole data set."""
    state = _description(directory / _STATE)
    if state.get("_indices_files"):
        raise DataError(told("selected rows", directory))
    entries = [entry.get("filename") for entry in state.get("_data_files") or [] if isinstance(entry, dict)]
    names = [name for name in entries if isinstance(name, str) and Path(name).name == name]
    if not names or len(names) < len(entries):
        raise DataError(f"{directory / _STATE}: names files outside its own directory")
    return [directory / name for name in names]


def _description(file: Path) -> dict[str, Any]:
    try:
        found = loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: {json_problem(error)}") from error
    return found if isinstance(found, dict) else {}


@contextmanager
def reading_arrow(place: Path, kind: str) -> Iterator[Any]:
    """Yield pyarrow to code that reads `place`. Raises DataError if it cannot be read as that kind, and
    EnvironmentProblem if pyarrow is missing."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise EnvironmentProblem(told("no pyarrow", place)) from error
    try:
        yield pyarrow
    except pyarrow.ArrowException as error:
        raise DataError(f"{place}: cannot be read as {kind}: {error}") from error
