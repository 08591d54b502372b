"""How the rows of a file, directory or data set are read, and the indexes of large ones."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tiercel.config.data import Data, FormatName
from tiercel.config.row_sources import RowSource
from tiercel.data.format_detection import begun, known_format
from tiercel.data.hub import places_of_files
from tiercel.data.index import SAY_SECONDS, IndexedRows, cache_folder, has_index, indexed
from tiercel.data.index_sources import LARGEST_SMALL_FILE, IndexSource, index_source
from tiercel.data.media.images import open_header
from tiercel.data.parallel_map import spread
from tiercel.data.records import Record
from tiercel.data.rows import Purpose, Reading
from tiercel.errors import DataError
from tiercel.log import logger
from tiercel.types import ImageRoots

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
    with telling_unreadable(file):
        first = None if is_large else begun(source, config)
        format = known_format(source, config) if first is None else first[0]
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
    if format == "refcoco" and config.prompt is None:
        raise DataError(
            f"{file}: its rows are referring expressions, which are not questions by themselves; set "
            'data.prompt, for example to "Where is {prompt}? Answer with its box."'
        )
    how = {"format": format, "column_names": config.columns, "max_image_pixels": config.max_image_pixels}
    with telling_unreadable(file):
        large = index_source(source, reading=reading, **how) if is_large else None
    return RowFile(source=source, format=format, reading=reading, indexed=large, first=first)


def make_indexes(
    files: Sequence[RowSource],
    describe: Callable[[RowSource], RowFile],
    name: str,
    config: Data,
    beat: Callable[[], None],
) -> None:
    """Make the indexes of many small files, unless the first and the last have one. Each process makes whole indexes,
    because starting processes for each file would take longer than its rows do."""
    cache = cache_folder(config.cache)

    def missing(file: RowSource) -> IndexSource | None:
        what = describe(file).indexed
        return None if what is None or has_index(what, cache) else what

    def make(file: RowSource) -> None:
        with suppress(DataError, OSError):  # reported when the file is read
            if (what := missing(file)) is not None:
                indexed(what, cache, lambda: None)

    sizes = [path.stat().st_size for file in files if (path := Path(file.path)).is_file()]
    if len(files) < MANY_FILES or max(sizes, default=0) > LARGEST_SMALL_FILE:
        return
    if missing(files[0]) is None and missing(files[-1]) is None:
        return
    spoken = time.monotonic()
    for done, _ in enumerate(spread(make, files), start=1):
        beat()
        if time.monotonic() - spoken > SAY_SECONDS:
            spoken = time.monotonic()
            logger.info(f"{name}: {done:,} of {len(files):,} files indexed")


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
        logger.warning(
            f"{what.reading.file}: all its rows are held in memory, because its index cannot be written ({error}); "
            "name another folder as data.cache"
        )
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
        raise DataError(
            f"data.image_root: is {config.image_root}, which is not a directory; use the directory that image paths "
            "are relative to"
        )
    return ImageRoots(base=config.image_root, more=(*config.image_roots, *(own if source.is_hub else ())))
