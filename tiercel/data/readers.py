"""Read records from files: JSON Lines, a JSON list, COCO's annotations, Parquet, and data sets of Hugging Face."""

import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercel.config.row_sources import RowSource
from tiercel.data.class_labels import class_labels, decoded, encoded_columns
from tiercel.data.hub import cached_files, read_batches
from tiercel.data.records import Record, json_problem, kind_of, loads, record_of_line, record_of_object, records_of_list
from tiercel.data.tar_shards import read_tar
from tiercel.data.texts import told
from tiercel.errors import DataError, EnvironmentProblem

LONGEST_MARGIN = 1000  # bytes of space before a list
_NUMBER = re.compile(r"\d+")  # as in 0001 of the hub's own files, or in part-00000-... of Spark
_SHARD = re.compile(r"-\d+-of-\d+(-[0-9a-f]+)?$")  # the end of the name of a file that is one part of a data set
_MOST_EXPANSION, _LEAST_LIMIT = 200, 2**30  # text rarely compresses to a twentieth; bytes
_BATCH_ROWS, _BATCH_BYTES = 256, 1 << 22  # read at once; rows with embedded images are large
_STATE, _SPLITS = "state.json", "dataset_dict.json"  # written by save_to_disk for one data set, and for several


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGroup:
    """Names rows that are read from their first one on: a row group of a Parquet file, or all of an Arrow file."""

    file: Path
    rows: int
    number: int | None = None  # of the row group
    batch_rows: int = _BATCH_ROWS


def records_of(source: RowSource) -> Iterator[Record]:
    """Read all records of a source, in their order. Raises DataError if they cannot be read, and EnvironmentProblem if
    a package is missing."""
    if source.is_hub:
        return _records_of_batches(read_batches(source, _BATCH_ROWS))
    path = Path(source.path)
    if path.is_dir():
        return read_groups(path)
    for ending, reader in READERS.items():
        if path.name.lower().endswith(ending):
            return reader(path)
    raise DataError(told("kind of file", path, path.suffix or "this", ", ".join(READERS)))


def files_of(source: RowSource) -> list[Path]:
    """Return the files that hold the rows, in their order. Raises what `records_of` raises."""
    if source.is_hub:
        return cached_files(source)
    found: list[Path] = []
    for path in map(Path, source.files):
        found += sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return found


def labelled_columns(source: RowSource) -> tuple[str, ...]:
    """Return the columns whose class labels are read as their names. Raises what `records_of` raises."""
    for file in files_of(source):
        if file.suffix not in (".parquet", ".arrow"):
            continue
        with _arrow(file, "a data set") as arrow:
            if file.suffix == ".parquet":
                return tuple(class_labels(arrow.parquet.read_schema(file).metadata))
            with arrow.memory_map(str(file)) as stream:
                return tuple(class_labels(arrow.ipc.open_stream(stream).schema.metadata))
    return ()


def read_json_lines(file: Path) -> Iterator[Record]:
    """Read a file with one JSON object per line. Raises DataError for a file in UTF-16."""
    with file.open("rb") as stream:
        yield from _json_lines(stream, file)


def read_gzipped_lines(file: Path) -> Iterator[Record]:
    """Read a .jsonl.gz file. Raises DataError if it is cut short, is not gzip, or expands beyond measure."""
    try:
        with gzip.open(file) as stream:
            yield from _json_lines(_expanding(stream, file), file)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{file}: cannot be read as gzip: {error}") from error


def read_zstd_lines(file: Path) -> Iterator[Record]:
    """Read a .jsonl.zst file. Raises DataError as `read_gzipped_lines` does, and EnvironmentProblem if pyarrow is
    missing."""
    with _arrow(file, "zstd") as pyarrow:
        try:
            with pyarrow.CompressedInputStream(pyarrow.OSFile(str(file)), "zstd") as raw:
                yield from _json_lines(_expanding(io.BufferedReader(raw), file), file)
        except OSError as error:  # ZSTD_decompress failed, or the stream ended early
            raise DataError(f"{file}: cannot be read as zstd: {error}") from error


def _json_lines(stream: Iterable[bytes], file: Path) -> Iterator[Record]:
    for line, data in enumerate(stream, start=1):
        if line == 1:
            _refuse_utf16(data, file)
        if (record := record_of_line(data, line)) is not None:
            yield record


def _expanding(stream: io.BufferedIOBase, file: Path) -> Iterator[bytes]:
    """Yield the lines of a compressed file. Raises DataError if it expands to more than text does, because a small file
    could fill the memory."""
    most = max(_LEAST_LIMIT, _MOST_EXPANSION * file.stat().st_size)
    total = 0
    while line := stream.readline(most - total + 1):
        total += len(line)
        if total > most:
            raise DataError(told("expands", file, most, _MOST_EXPANSION))
        yield line


def read_json_list(file: Path) -> Iterator[Record]:
    """Read a file with a JSON list of objects, or with COCO's images and annotations. Raises DataError for any other
    file."""
    data = file.read_bytes()
    _refuse_utf16(data, file)
    if not data.strip():
        return
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        values = loads(data)
    except (ValueError, RecursionError) as error:
        is_list = data[:LONGEST_MARGIN].lstrip().startswith(b"[")
        if is_list and (records := records_of_list(data)) is not None:
            yield from records
            return
        if is_list:
            raise DataError(f"{file}: {json_problem(error)}") from error
        raise DataError(told("lines in a list", file, json_problem(error))) from error
    match values:
        case {"images": list(images), "annotations": list(annotations)}:
            yield from _coco_records(images, annotations)
        case list():
            for number, value in enumerate(values, start=1):
                yield record_of_object(value, number)
        case _:
            wanted = "a list of rows, or COCO's images and annotations"
            raise DataError(f"{file}: contains a JSON {kind_of(values)}, but a .json file must contain {wanted}")


def read_groups(path: Path) -> Iterator[Record]:
    """Read a Parquet file, or a data set that Hugging Face's datasets wrote: a directory with Arrow files of
    save_to_disk, or with Parquet files of a repository. Raises what `row_groups` raises."""
    line = 1
    for group in row_groups(path):
        yield from records_of_group(group, line)
        line += group.rows


def row_groups(path: Path) -> Iterator[RowGroup]:
    """Yield the row groups of a Parquet file or of a directory, in order. Raises DataError if it cannot be read or is
    not one data set, and EnvironmentProblem if pyarrow is missing."""
    if (path / _STATE).is_file():
        yield from arrow_groups(_arrow_files(path))
        return
    for file in _parquet_files(path) if path.is_dir() else [path]:
        with _arrow(file, "a Parquet file") as pyarrow:
            found = pyarrow.parquet.read_metadata(file, memory_map=True)
            groups = [found.row_group(number) for number in range(found.num_row_groups)]
        for number, group in enumerate(groups):
            most = _BATCH_BYTES * group.num_rows // max(group.total_byte_size, 1)
            yield RowGroup(file=file, rows=group.num_rows, number=number, batch_rows=min(max(most, 1), _BATCH_ROWS))


def arrow_groups(files: Iterable[Path]) -> Iterator[RowGroup]:
    """Yield each Arrow file as one group. Raises what `batches_of` raises."""
    for file in files:
        yield RowGroup(file=file, rows=sum(batch.num_rows for batch in batches_of(RowGroup(file=file, rows=0))))


def batches_of(group: RowGroup) -> Iterator[Any]:
    """Yield the Arrow batches of a group, each decoded when it is asked for. Raises DataError or OSError if one cannot
    be read."""
    if group.number is None:
        with _arrow(group.file, "a data set") as arrow, arrow.memory_map(str(group.file)) as source:
            yield from arrow.ipc.open_stream(source)
        return
    with (
        _arrow(group.file, "a Parquet file") as pyarrow,
        pyarrow.parquet.ParquetFile(group.file, memory_map=True) as table,
    ):
        # Without threads, because processes that were forked read too.
        yield from table.iter_batches(group.batch_rows, row_groups=[group.number], use_threads=False)


def records_of_group(group: RowGroup, line: int) -> Iterator[Record]:
    """Yield the rows of a group, whose first is `line`. If the rest of a row group cannot be read, each of its rows is
    a problem."""
    read = 0
    try:
        for batch in batches_of(group):
            yield from _records_of_batch(batch, line + read)
            read += batch.num_rows
    except (DataError, OSError) as error:
        problem = unreadable(group, error)
        for number in range(read, group.rows):
            yield Record(line=line + number, problem=problem)


def unreadable(group: RowGroup, error: Exception) -> str:
    """Return why rows of a row group cannot be used. Raises the error for an Arrow file, which does not say how many
    rows it should have."""
    if group.number is None:
        raise error
    return f"row group {group.number} of {group.file} cannot be read: {error}"


def _coco_records(images: list[Any], annotations: list[Any]) -> Iterator[Record]:
    """Yield each annotation with the file and the size of its image. If an annotation has no caption, it gets that of
    its image, as in MDETR's files."""
    described = [image for image in images if isinstance(image, dict)]
    by_id = {image["id"]: image for image in described if isinstance(image.get("id"), int | str)}
    for number, annotation in enumerate(annotations, start=1):
        if not isinstance(annotation, dict):
            yield record_of_object(annotation, number)
            continue
        image_id = annotation.get("image_id")
        image = by_id.get(image_id) if isinstance(image_id, int | str) else None
        if image is None or not isinstance(image.get("file_name"), str):
            yield Record(line=number, problem=told("annotation without an image", number, image_id))
            continue
        of_image = {key: image[key] for key in ("caption", "width", "height") if key in image}
        yield Record(line=number, value={**of_image, **annotation, "image": image["file_name"]})


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


def _records_of_batches(batches: Iterable[Any]) -> Iterator[Record]:
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


def _description(file: Path) -> dict[str, Any]:
    try:
        found = loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: {json_problem(error)}") from error
    return found if isinstance(found, dict) else {}


@contextmanager
def _arrow(place: Path, kind: str) -> Iterator[Any]:
    """Yield pyarrow to code that reads `place`. Raises DataError if it cannot be read as that kind, and
    EnvironmentProblem if pyarrow is missing."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise EnvironmentProblem(told("no pyarrow", place)) from error
    try:
        yield pyarrow
    except pyarrow.ArrowException as error:
        raise DataError(f"{place}: cannot be read as {kind}: {error}") from error


READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    ".jsonl": read_json_lines,
    ".jsonl.gz": read_gzipped_lines,
    ".jsonl.zst": read_zstd_lines,
    ".json": read_json_list,
    ".parquet": read_groups,
    ".tar": read_tar,
}


def _refuse_utf16(data: bytes, file: Path) -> None:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{file}: is encoded in UTF-16; save it as UTF-8")
