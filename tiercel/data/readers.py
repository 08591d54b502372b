"""Read records from files: JSON Lines, a JSON list, COCO's annotations, Parquet, and data sets of Hugging Face."""

import gzip
import io
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from tiercel.config.row_sources import RowSource
from tiercel.data.arrow_files import BATCH_ROWS, read_groups, reading_arrow, records_of_batches
from tiercel.data.class_labels import class_labels
from tiercel.data.hub import cached_files, read_batches
from tiercel.data.records import Record, json_problem, kind_of, loads, record_of_line, record_of_object, records_of_list
from tiercel.data.tar_shards import read_tar
from tiercel.data.texts import told
from tiercel.errors import DataError

LONGEST_MARGIN = 1000  # bytes of space before a list
_MOST_EXPANSION, _LEAST_LIMIT = 200, 2**30  # text rarely compresses to a twentieth; bytes


def records_of(source: RowSource, pictures: Collection[str] = ()) -> Iterator[Record]:
    """Read all records of a source, in their order. Those of tables may lack the bytes of pictures in the columns
    `pictures`; see `records_of_group`. Raises DataError if they cannot be read, and EnvironmentProblem if a package is
    missing."""
    if source.is_hub:
        return records_of_batches(read_batches(source, BATCH_ROWS))
    path = Path(source.path)
    if path.is_dir() or path.suffix.lower() == ".parquet":
        return read_groups(path, pictures)
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
        with reading_arrow(file, "a data set") as arrow:
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
    with reading_arrow(file, "zstd") as pyarrow:
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
