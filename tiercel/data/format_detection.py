"""The first rows of a source, which say what format its rows have."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

from tiercel.config.data import Data, FormatName
from tiercel.config.row_sources import RowSource
from tiercel.data.formats.columns import lacking, named, require_columns
from tiercel.data.formats.registry import detect_format
from tiercel.data.index import cache_folder, kept_unlocked
from tiercel.data.readers import files_of, records_of
from tiercel.data.records import Record
from tiercel.errors import DataError

_DETECTION_ROWS = 64


def begun(source: RowSource, config: Data) -> tuple[FormatName, Iterator[Record], Counter[str]]:
    """Read the first rows of a source. Return its format, all its records, and the numbers of rows that lack a column
    of data.columns, which are counted while the records are read."""
    without: Counter[str] = Counter()
    records = records_of(source)
    first = list(islice(records, _DETECTION_ROWS))
    if not first:
        raise DataError(f"{source.name}: the file has no rows")
    if config.columns:
        require_columns(first, config.columns, source.name, is_whole=len(first) < _DETECTION_ROWS)
        first = list(_named(first, config.columns, without))
        records = _named(records, config.columns, without)
    return _format(first, config, source.name), chain(first, records), without


def known_format(source: RowSource, config: Data) -> FormatName:
    """Return the format of a source. It is kept in the cache, because a start with 1,000 shards would read the first
    rows of each only for it."""
    states = [(os.path.abspath(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files_of(source)]
    key = ["format", source.name, config.format, dict(config.columns), states]
    try:
        return kept_unlocked(cache_folder(config.cache), key, lambda: begun(source, config)[0])
    except OSError:  # the cache cannot be written
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
