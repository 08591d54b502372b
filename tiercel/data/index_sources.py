"""What an index can be made of: lines of a JSON Lines file, rows of Parquet and Arrow files, members of a tar shard."""

import atexit
import io
import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from tiercel.config.data import FormatName
from tiercel.config.row_sources import RowSource
from tiercel.data.arrow_files import (
    RowGroup,
    arrow_groups,
    batches_of,
    record_at,
    records_of_group,
    row_groups,
    unreadable,
)
from tiercel.data.formats.columns import named
from tiercel.data.formats.registry import rows_of
from tiercel.data.hub import cached_files
from tiercel.data.picture_columns import picture_columns
from tiercel.data.records import Record, record_of_line
from tiercel.data.rows import Reading
from tiercel.data.tar_shards import placed_records, record_of_members, spans
from tiercel.data.texts import told
from tiercel.errors import DataError
from tiercel.types import ImageSource, RejectedRow, Row, Size

LARGEST_SMALL_FILE = 1 << 26  # bytes; several processes share the rows of a larger file, and beat while they read it
_CHUNK = 1 << 20  # bytes of lines that a process reads at once
_SPANS = 64  # rows of a tar shard that a process reads at once
_ENDS = 1 << 16  # bytes at the beginning and at the end of a file that tell whether it is the same
_KEPT_BYTES = 1 << 26  # of Arrow batches that a process keeps for the next rows


RecordAt = Callable[[int, int, int], Record | None]  # by offset, length and line; see `IndexSource.records`


class PicturesNeeded(Exception):
    """Raised if rows cannot be read without the bytes of their pictures: boxes may be in units of a picture's size."""


def _need_pictures(image: ImageSource) -> Size:
    raise PicturesNeeded


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexSource(ABC):
    """Describes rows that can be indexed, and how they are read. `parts` can be read apart, in several processes."""

    has_pictures: ClassVar[bool] = False  # as bytes, in the files themselves

    path: str
    asked_format: FormatName  # data.format
    format: FormatName | None = None  # of the rows; not needed to find an index that is there
    column_names: Mapping[str, str]
    reading: Reading
    max_image_pixels: int
    by_beginning: bool = False  # the column `beginning` will be asked for

    @property
    def without_pictures(self) -> "IndexSource":
        """Return the same rows, with UNREAD in place of the bytes of their pictures. They raise PicturesNeeded if they
        cannot be read without these."""
        return self

    @property
    def has_beginnings(self) -> bool:
        """Return whether the index has the column `beginning`. If each picture would have to be hashed for it, it has
        the column only if that is asked for."""
        return self.by_beginning or not self.has_pictures

    @property
    @abstractmethod
    def files(self) -> list[Path]:
        """Return the files that hold the rows."""

    @abstractmethod
    def parts(self, beat: Callable[[], None]) -> Iterator[Any]:
        """Yield what `records` is called with, in the order of the rows."""

    @abstractmethod
    def records(self, part: Any) -> Iterator[tuple[int, int, Record]]:
        """Yield the records of a part, each after the two numbers by which it is found again."""

    @abstractmethod
    def reader(self, of: Sequence[Any]) -> RecordAt:
        """Return a function that reads a record again. It raises DataError if the files are not those of `of`, which
        `identity` has returned."""

    def rows(self, record: Record) -> list[Row | RejectedRow]:
        """Return the rows of a record. The format must be known."""
        assert self.format is not None
        return rows_of(named(record, self.column_names) if self.column_names else record, self.format, self.reading)

    def identity(self) -> list[Any]:
        """Return path, size, time, and a hash of the beginning and the end, for each file."""
        return [_identity_of(file) for file in self.files]

    @property
    def key(self) -> str:
        """Hash what names the index: the path, and everything that decides how its rows are read."""
        roots = self.reading.image_roots
        how = {
            "path": os.path.abspath(self.path),
            "name": self.reading.file,
            "format": self.asked_format,
            "columns": dict(self.column_names),
            "roots": [roots.base, *roots.more, *map(os.path.abspath, (roots.base, *roots.more))],
            "pixels": self.max_image_pixels,
            "reading": [getattr(self.reading, name) for name in ("purpose", "prompt", "box_space", "ids", "stem")],
            "turns": self.reading.last_turn_only,
            "beginnings": self.has_beginnings,
        }
        return sha256(json.dumps(how).encode()).hexdigest()[:32]

    def require_same(self, file: Path, of: Sequence[Any]) -> None:
        """Raise DataError if a file is another than when its index was opened."""
        status = file.stat() if file.exists() else None
        if status is None or [status.st_size, status.st_mtime_ns] != of[1:3]:
            raise DataError(f"{self.reading.file}: has changed since this process began to read it; start again")


class LineFile(IndexSource):
    """Describes a JSON Lines file. A record is found by its line's offset and length, in bytes."""

    record_of: Callable[[bytes, int], Record | None] = staticmethod(record_of_line)

    @property
    def files(self) -> list[Path]:
        return [Path(self.path)]

    def parts(self, beat: Callable[[], None]) -> Iterator[Any]:
        """Yield parts that end with a line: where each begins and ends, and the number of its first line."""
        start = position = 0
        line = 1
        with open(self.path, "rb") as stream:
            while block := stream.read(_CHUNK):
                beat()
                if cut := block.rfind(b"\n") + 1:
                    yield start, position + cut, line
                    start, line = position + cut, line + block.count(b"\n")
                position += len(block)
        if start < position:
            yield start, position, line

    def records(self, part: Any) -> Iterator[tuple[int, int, Record]]:
        offset, end, line = part
        with open(self.path, "rb") as stream:
            stream.seek(offset)
            data = stream.read(end - offset)
        for number, text in enumerate(io.BytesIO(data), start=line):
            if (record := self.record_of(text, number)) is not None:
                yield offset, len(text), record
            offset += len(text)

    def reader(self, of: Sequence[Any]) -> RecordAt:
        def record(offset: int, length: int, line: int) -> Record | None:
            self.require_same(Path(self.path), of[0])
            with open(self.path, "rb") as stream:  # not held open, because there may be thousands of shards
                return self.record_of(os.pread(stream.fileno(), length, offset), line)

        return record


class TarShard(LineFile):
    """Describes a tar shard. A record is found by offset and length of its members."""

    has_pictures = True
    record_of = staticmethod(record_of_members)

    def parts(self, beat: Callable[[], None]) -> Iterator[Any]:
        """Yield some rows: the number of the first, then offset and length of each. A small shard is read as a
        whole."""
        if Path(self.path).stat().st_size <= LARGEST_SMALL_FILE:
            yield None
            return
        every = spans(Path(self.path))
        line = 1
        while some := list(islice(every, _SPANS)):
            beat()
            yield line, some
            line += len(some)

    def records(self, part: Any) -> Iterator[tuple[int, int, Record]]:
        if part is None:
            yield from placed_records(Path(self.path))
            return
        first, some = part
        with open(self.path, "rb") as stream:
            for line, (offset, length) in enumerate(some, start=first):
                yield offset, length, record_of_members(os.pread(stream.fileno(), length, offset), line)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupFiles(IndexSource):
    """Describes a Parquet file, a directory of Parquet or Arrow files, or Arrow files in the cache of datasets. A
    record is found by the number of its row group among those of all files, and its place within it."""

    has_pictures = True

    cached: tuple[Path, ...] = ()
    leaves_pictures_out: bool = False

    @property
    def without_pictures(self) -> "GroupFiles":
        if self.by_beginning:  # which the bytes of pictures belong to
            return self
        return replace(self, leaves_pictures_out=True, reading=replace(self.reading, image_size=_need_pictures))

    def groups(self) -> Iterator[RowGroup]:
        """Yield the row groups of all files."""
        return arrow_groups(self.cached) if self.cached else row_groups(Path(self.path))

    @property
    def files(self) -> list[Path]:
        if not self.cached and Path(self.path).is_file():
            return [Path(self.path)]
        return list(dict.fromkeys(group.file for group in self.groups()))

    def parts(self, beat: Callable[[], None]) -> Iterator[tuple[int, RowGroup, int]]:
        """Yield row groups: number, group, and the line of its first row."""
        line = 1
        for number, group in enumerate(self.groups()):
            beat()
            yield number, group, line
            line += group.rows

    def records(self, part: tuple[int, RowGroup, int]) -> Iterator[tuple[int, int, Record]]:
        number, group, line = part
        pictures = picture_columns(self.column_names) if self.leaves_pictures_out else ()
        return ((number, record.line - line, record) for record in records_of_group(group, line, pictures))

    def reader(self, of: Sequence[Any]) -> RecordAt:
        groups, of_files = list(self.groups()), {each[0]: each for each in of}
        lost: dict[int, tuple[int, str]] = {}  # where a group cannot be read any further, and why

        def record(number: int, row: int, line: int) -> Record:
            group = groups[number]
            of_file = of_files[os.path.abspath(group.file)]
            self.require_same(group.file, of_file)
            if number in lost and row >= lost[number][0]:
                return Record(line=line, problem=lost[number][1])
            try:
                start, batch = _BATCHES.at(group, of_file[2], row)
            except (DataError, OSError) as error:
                lost[number] = (_BATCHES.next, unreadable(group, error))
                return Record(line=line, problem=lost[number][1])
            return record_at(batch, row - start, line)

        return record


def index_source(source: RowSource, **how: Any) -> IndexSource | None:
    """Describe the rows of a source as what an index can be made of; None for a kind of file that has no index, and for
    a part of a split of the hub."""
    if source.split is not None:
        files = () if "[" in source.split else tuple(cached_files(source))
        return GroupFiles(path=source.path, cached=files, **how) if files else None
    path = Path(source.path)
    kinds = {".jsonl": LineFile, ".tar": TarShard, ".parquet": GroupFiles}
    kind = GroupFiles if path.is_dir() else kinds.get(path.suffix.lower())
    return None if kind is None else kind(path=source.path, **how)


class _Batches(threading.local):
    """Keeps the Arrow batches that a process read last, of all its files. A group is read from its beginning up to the
    row that is wanted, and goes on from there."""

    def __init__(self) -> None:
        self.next = 0  # the row of the group that is read next
        self.kept: list[tuple[tuple[RowGroup, int], int, Any]] = []  # group and its file's time, first row, batch
        self._of: tuple[RowGroup, int] | None = None
        self._batches: Iterator[Any] = iter(())

    def close(self) -> None:
        """Close the file that is being read, while the modules that this needs are there."""
        self._of, self._batches = None, iter(())

    def at(self, group: RowGroup, time: int, row: int) -> tuple[int, Any]:
        """Return the batch that has a row, after the place of its first row."""
        for place, (of, start, batch) in enumerate(self.kept):
            if of == (group, time) and start <= row < start + batch.num_rows:
                self.kept.append(self.kept.pop(place))
                return start, batch
        if self._of != (group, time) or row < self.next:
            self.next, self._batches = 0, batches_of(group)
        self._of = None  # until the batch is there; a stream that has failed cannot go on
        for batch in self._batches:
            start, self.next = self.next, self.next + batch.num_rows
            self.kept.append(((group, time), start, batch))
            while len(self.kept) > 1 and sum(batch.nbytes for _, _, batch in self.kept) > _KEPT_BYTES:
                del self.kept[0]
            if row < self.next:
                self._of = group, time
                return start, batch
        raise DataError(told("fewer rows than said", group.file))


_BATCHES = _Batches()
atexit.register(_BATCHES.close)


def _identity_of(file: Path) -> list[Any]:
    with open(file, "rb") as stream:
        status = os.fstat(stream.fileno())
        ends = os.pread(stream.fileno(), _ENDS, 0) + os.pread(stream.fileno(), _ENDS, max(0, status.st_size - _ENDS))
    return [os.path.abspath(file), status.st_size, status.st_mtime_ns, sha256(ends).hexdigest()]
