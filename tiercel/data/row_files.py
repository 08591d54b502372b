"""How the rows of a file, directory or data set are read, which their first rows say, and the indexes of large ones."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path

from tiercel.config.data import Data, FormatName
from tiercel.config.row_sources import RowSource
from tiercel.data.arrow_files import row_groups
from tiercel.data.formats.columns import lacking, named, require_columns
from tiercel.data.formats.registry import detect_format
from tiercel.data.hub import places_of_files
from tiercel.data.index import SAY_SECONDS, IndexedRows, cache_folder, format_in_index, has_index, indexed
from tiercel.data.index_sources import LARGEST_SMALL_FILE, IndexSource, index_source
from tiercel.data.media.images import open_header
from tiercel.data.parallel_map import spread
from tiercel.data.picture_columns import picture_columns
from tiercel.data.readers import records_of
from tiercel.data.records import Record
from tiercel.data.rows import Reading
from tiercel.data.texts import told
from tiercel.data.turns import Purpose
from tiercel.errors import DataError
from tiercel.log import logger
from tiercel.types import ImageRoots

_DETECTION_ROWS = 64
_FEW_ROWS = 1 << 14  # which take a process about a second
MANY_FILES = 8  # of a pattern: their indexes are made several at once


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFile:
    """Holds how the rows of a file, directory or data set are read."""

    source: RowSource
    format: FormatName
    reading: Reading
    indexed: IndexSource | None  # None if they are held in memory
    first: tuple[FormatName, Iterator[Record], Counter[str]] | None  # what `begun` found, if it had to be asked


def row_file(source: RowSource, stem: str, *, config: Data, purpose: Purpose, is_large: bool) -> RowFile:
    """Find out how the rows of a source are read. Raises DataError."""
    file = source.name
    roots = image_roots_of(source, config)
    reading = Reading(
        file=file,
        purpose=purpose,
        image_roots=roots,
        image_size=partial(open_header, roots=roots, max_pixels=config.max_image_pixels),
        prompt=config.prompt,
        box_space=config.boxes,
        ids=config.ids,
        last_turn_only=purpose != "grpo" and (purpose != "sft" or config.train_turns == "last"),
        stem=stem,
    )
    indexed, first = None, None
    with telling_unreadable(file):
        if is_large:
            indexed = index_source(
                source,
                reading=reading,
                asked_format=config.format,
                column_names=config.columns,
                max_image_pixels=config.max_image_pixels,
                by_beginning=config.group_by_prefix,
            )
        if indexed is None:
            first = begun(source, config)
            format = first[0]
        else:
            format = format_in_index(indexed, cache_folder(config.cache)) or _format_of_first(source, config)
            indexed = replace(indexed, format=format)
    if format == "refcoco" and config.prompt is None:
        raise DataError(told("expressions without a question", file))
    return RowFile(source=source, format=format, reading=reading, indexed=indexed, first=first)


def begun(
    source: RowSource, config: Data, pictures: Collection[str] = ()
) -> tuple[FormatName, Iterator[Record], Counter[str]]:
    """Read the first rows of a source. Return its format, all its records, and the numbers of rows that lack a column
    of data.columns, which are counted while the records are read. `pictures` is that of `records_of`."""
    without: Counter[str] = Counter()
    records = records_of(source, pictures)
    first = list(islice(records, _DETECTION_ROWS))
    if not first:
        raise DataError(f"{source.name}: the file has no rows")
    if config.columns:
        require_columns(first, config.columns, source.name, is_whole=len(first) < _DETECTION_ROWS)
        first = list(_named(first, config.columns, without))
        records = _named(records, config.columns, without)
    return _format(first, config, source.name), chain(first, records), without


def _format_of_first(source: RowSource, config: Data) -> FormatName:
    """Return the format of a source by its first rows, without their pictures if that is possible."""
    with suppress(DataError, OSError):  # with the pictures, the rows that can be read are read, or the problem told
        return begun(source, config, picture_columns(config.columns))[0]
    return begun(source, config)[0]


def _named(records: Iterable[Record], column_names: Mapping[str, str], without: Counter[str]) -> Iterator[Record]:
    for record in records:
        if record.problem is None:
            without.update(lacking(record, column_names))
        yield named(record, column_names)


def _format(head: Sequence[Record], config: Data, file: str) -> FormatName:
    if config.format != "auto":
        return config.format
    readable = [record.value for record in head if record.problem is None]
    if not readable:
        raise DataError(f"{file}: none of its first {len(head)} rows is a JSON object; line 1: {head[0].problem}")
    return detect_format(readable, file)


def make_indexes(
    files: Sequence[RowSource],
    describe: Callable[[RowSource], RowFile],
    name: str,
    config: Data,
    beat: Callable[[], None],
) -> None:
    """Make the indexes of many files with few rows, unless the first and the last have one. Each process makes whole
    indexes, because starting processes for each file would take longer than its rows do."""
    cache = cache_folder(config.cache)

    def missing(file: RowSource) -> IndexSource | None:
        what = describe(file).indexed
        return None if what is None or has_index(what, cache) else what

    def make(file: RowSource) -> None:
        with suppress(DataError, OSError):  # reported when the file is read
            if (what := missing(file)) is not None:
                indexed(what, cache, lambda: None)

    if len(files) < MANY_FILES or (missing(files[0]) is None and missing(files[-1]) is None):
        return
    if not all(_has_few_rows(Path(file.path), config) for file in files):
        return
    spoken = time.monotonic()
    for done, _ in enumerate(spread(make, files), start=1):
        beat()
        if time.monotonic() - spoken > SAY_SECONDS:
            spoken = time.monotonic()
            logger.info(f"{name}: {done:,} of {len(files):,} files indexed")


def _has_few_rows(path: Path, config: Data) -> bool:
    """Return whether one process soon has the rows of a file, of which it may not need the pictures."""
    if not path.is_file() or path.stat().st_size <= LARGEST_SMALL_FILE:
        return True
    if path.suffix.lower() != ".parquet" or config.group_by_prefix:
        return False
    with suppress(DataError):
        return sum(group.rows for group in row_groups(path)) <= _FEW_ROWS
    return True  # the problem is reported when the file is read


@contextmanager
def telling_unreadable(file: str) -> Iterator[None]:
    """Raise DataError in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error


def open_index(what: IndexSource, config: Data, beat: Callable[[], None]) -> IndexedRows | None:
    """Open or make an index. Return None, after a warning, if the cache cannot be written."""
    try:
        return indexed(what, cache_folder(config.cache), beat)
    except OSError as error:
        logger.warning(told("no index", what.reading.file, error))
        return None


def image_roots_of(source: RowSource, config: Data) -> ImageRoots:
    """Return the directories that may hold the images of a source. Raises DataError if data.image_root is not a
    directory."""
    if source.is_hub:
        own = places_of_files(source)
    else:
        path = Path(source.path)
        own = (str(path if path.is_dir() else path.parent),)
    if config.image_root is None:
        return ImageRoots(base=own[0], more=(*config.image_roots, *own[1:]))
    if not Path(config.image_root).is_dir():
        raise DataError(told("no directory of images", config.image_root))
    return ImageRoots(base=config.image_root, more=(*config.image_roots, *(own if source.is_hub else ())))
