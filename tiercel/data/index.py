"""The index of a large file or directory of rows: where each row lies, and what a run must know of it before its turn.

An index is a file in the cache (`data.cache`), named by the file's path, by how its rows are read, and by the version:

    the usable rows, each an ENTRY: the COLUMNS of stores.py, and the places of the row and of its id
    their ids, end to end
    the head, JSON: what it is an index of, a checksum of the above, and the rows that cannot be used, with reasons
    the length of the head, 8 bytes

It is written under a temporary name and renamed, so what is there is whole. It is used if the version of the code that
reads rows, the file's size, time, beginning and end, and the checksum are as written, and if the rejected rows are
still rejected for the same reasons; otherwise it is made again. Processes of a machine share its pages. It is one file
because a data set may have thousands of shards, and a process may map some 65,000 files.
"""

import ctypes
import fcntl
import json
import mmap
import os
import re
import shutil
import tempfile
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from hashlib import sha256
from os.path import expanduser
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from tiercel.config.data import FormatName
from tiercel.data.formats.columns import lacking
from tiercel.data.index_sources import LARGEST_SMALL_FILE, IndexSource, PicturesNeeded
from tiercel.data.parallel_map import spread
from tiercel.data.record_values import shortened
from tiercel.data.stores import COLUMNS, RowStore, RowView, facts_of, same_ids
from tiercel.data.texts import told
from tiercel.errors import DataError
from tiercel.log import logger
from tiercel.regular_files import read_regular
from tiercel.types import RejectedRow, Row

ENTRY = np.dtype(
    [
        *((name, dtype) for name, (dtype, _) in COLUMNS.items()),
        ("offset", "<u8"),  # with `length`, the numbers of IndexSource.records
        ("id_offset", "<u8"),  # among the ids, in bytes
        ("length", "<u4"),
        ("number", "<u4"),  # of the row within its record
        ("id_length", "<u4"),
    ],
    align=True,
)
_LENGTH_BYTES = 8
_LIBRARY = ctypes.CDLL(None, use_errno=True)
_LOCKS = 2  # digits of a small file's index that name its lock: thousands of shards share 256 of them
SAY_SECONDS = 10.0
_AT_ONCE = 1 << 16  # rows
_HELD_ID_BYTES = 1 << 22  # while an index is made; more are written to a temporary file
_WAIT_SECONDS = 0.1
_NAME = re.compile("[0-9a-f]{32}-[0-9a-f]{16}")  # of an index: what it is of, and the version
_CHANGED = "the file has changed since its index was made"
_UNUSED_SECONDS = 30 * 24 * 3600.0  # after which the index of another version is removed


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedRows:
    """Holds the rows of an indexed file."""

    store: RowStore
    rejected: tuple[RejectedRow, ...]
    without: tuple[tuple[str, int], ...]  # columns of data.columns, and how many rows lack each


class FileStore(RowStore):
    """Reads a row from its file when it is asked for."""

    def __init__(self, source: IndexSource, path: Path, head: Mapping[str, Any]):
        self.file, self.cache = source.reading.file, path.parent
        named = [source.key, head["of"], head["version"], head["checksum"]]
        self.key = sha256(json.dumps(named).encode()).hexdigest()
        self._source, self.path, self._head = source, path, head
        self._bytes = mapped(path)
        self._entries = self._bytes[: head["rows"] * ENTRY.itemsize].view(ENTRY)
        self._record = source.reader(head["of"])

    def __reduce__(self) -> tuple[Any, ...]:  # for loader workers that are not forked
        return FileStore, (self._source, self.path, self._head)

    def __len__(self) -> int:
        return int(self._head["rows"])

    @property
    def size(self) -> int:
        """Return the size of the index, in bytes."""
        return len(self._bytes)

    def look(self, number: int) -> Row | RejectedRow:
        entry = self._entries[number]
        offset, length, line, place = (int(entry[name]) for name in ("offset", "length", "line", "number"))
        record = self._record(offset, length, line)
        found = [] if record is None else self._source.rows(record)
        if place >= len(found):
            raise DataError(told("changed line", self.file, line, self.path))
        return found[place]

    def column(self, name: str) -> np.ndarray:
        assert name != "beginning" or self._source.has_beginnings  # else it was left out
        return self._entries[name]

    def ids(self) -> Iterator[str]:
        for first in range(0, len(self), _AT_ONCE):
            some = self._entries[first : first + _AT_ONCE]
            starts, lengths = (some["id_offset"] + np.uint64(self._entries.nbytes)).tolist(), some["id_length"].tolist()
            text = self._bytes[starts[0] : starts[-1] + lengths[-1]].tobytes()
            for start, length in zip(starts, lengths, strict=True):
                yield text[start - starts[0] : start - starts[0] + length].decode()


def mapped(file: Path) -> np.ndarray:
    """Map a file that is not empty, and return its bytes, uint8 (bytes,). Python's own `mmap` would keep a descriptor
    open for each map, and a process may have some thousand of them."""
    map_pages = _LIBRARY.mmap
    map_pages.restype = ctypes.c_void_p
    map_pages.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_ssize_t)
    with open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        address = map_pages(None, size, mmap.PROT_READ, mmap.MAP_SHARED, stream.fileno(), 0)
        if address in (None, ctypes.c_void_p(-1).value):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(file))
    pages = (ctypes.c_uint8 * size).from_address(address)
    unmap = weakref.finalize(pages, _LIBRARY.munmap, ctypes.c_void_p(address), ctypes.c_size_t(size))
    unmap.atexit = False  # other threads may still read them then
    found = np.ctypeslib.as_array(pages)
    found.flags.writeable = False
    return found


def indexed(source: IndexSource, cache: Path, beat: Callable[[], None]) -> IndexedRows:
    """Open the index of a file, or make it. One process makes it while others wait. Raises OSError if the cache cannot
    be written, and DataError if the file changes meanwhile."""
    file = _file(source, cache)
    cache.mkdir(parents=True, exist_ok=True)
    is_small = os.path.isfile(source.path) and os.path.getsize(source.path) <= LARGEST_SMALL_FILE
    with locked(cache / f"index-{source.key[: _LOCKS if is_small else None]}.lock", beat):
        found = _opened(source, file)
        if isinstance(found, str):
            if found:
                logger.warning(f"{source.reading.file}: {found}; its index is made again")
            _make(source, file, file.with_suffix(".small.tmp" if is_small else ".tmp"), beat)
            found = _opened(source, file)
        if found == _CHANGED:
            raise DataError(told("changed while read", source.reading.file))
        if isinstance(found, str):
            raise DataError(f"{source.reading.file}: {found}, while its index was made; start again")
        with suppress(OSError):  # such as that the file is another user's
            os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns))  # it is in use
    return found


def has_index(source: IndexSource, cache: Path) -> bool:
    """Return whether a file has an index of this version, which may be one of the file before it changed."""
    try:
        return bool(_head_of(_file(source, cache))["version"] == version())
    except (ValueError, LookupError, TypeError, OSError):
        return False


def format_in_index(source: IndexSource, cache: Path) -> FormatName | None:
    """Return the format that an index has recorded for its rows, or None if there is no index of this version or the
    files have changed since. Without it, a start with 1,000 shards would read the first rows of each again."""
    try:
        head = _head_of(_file(source, cache))
        is_whole = head["version"] == version() and head.pop("head") == _checksum_of(head)
        states = [[os.path.abspath(file), (now := file.stat()).st_size, now.st_mtime_ns] for file in source.files]
        return head["format"] if is_whole and [each[:3] for each in head["of"]] == states else None
    except (ValueError, LookupError, TypeError, OSError):
        return None


def _file(source: IndexSource, cache: Path) -> Path:
    return cache / f"{source.key}-{version()}.index"  # so that versions may share the folder


def _opened(source: IndexSource, file: Path) -> IndexedRows | str:
    """Return what an index has, or why it cannot be used; no reason if there is none."""
    try:
        head = _head_of(file)
        if head["version"] != version():
            return "its index is of another version of tiercel"
        if head["of"] != source.identity():
            return _CHANGED
        content = mapped(file)[: head["rows"] * ENTRY.itemsize + head["id_bytes"]]
        if head["checksum"] != zlib.crc32(content.data) or head.pop("head") != _checksum_of(head):
            return "its index is damaged"
        lines = head.pop("rejected")
        rejected = [RejectedRow(file=source.reading.file, **line["row"]) for line in lines]
    except FileNotFoundError:
        return ""
    except (ValueError, LookupError, TypeError, OSError):
        return "its index is damaged"
    store = FileStore(source, file, head)
    record_at = source.reader(head["of"])
    for line, row in zip(lines, rejected, strict=True):
        if line["repeats"]:
            continue
        record = record_at(line["offset"], line["length"], row.line)
        if record is None or row not in source.rows(record):
            return f"the reason to reject its line {row.line} is gone"
    return IndexedRows(store=store, rejected=tuple(rejected), without=tuple(map(tuple, head["without"])))


def _head_of(file: Path) -> dict[str, Any]:
    """Read the head of an index. Raises ValueError and OSError if there is none."""
    with open(file, "rb") as stream:
        end = stream.seek(-_LENGTH_BYTES, os.SEEK_END)
        length = int.from_bytes(stream.read(), "little")
        stream.seek(end - length)
        found: dict[str, Any] = json.loads(stream.read(length))
        return found


def _checksum_of(head: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(head).encode())


@cache
def version() -> str:
    """Hash the code that reads rows, and its table of formats. An index of other code is made again."""
    digest = sha256()
    for file in sorted(file for file in Path(__file__).parent.rglob("*") if file.suffix in (".py", ".txt")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder(given: str | None) -> Path:
    """Return the folder of indexes: under `data.cache`, or else under the user's cache directory."""
    if given is not None:
        return Path(expanduser(given)) / "rows"
    try:
        users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # neither HOME nor a user of this number, as in a container
        users = Path(tempfile.gettempdir(), f"tiercel-{os.getuid()}")
    return users / "tiercel" / "rows"


def remembered(rows: RowView, what: str, make: Callable[[], Any], beat: Callable[[], None] = lambda: None) -> Any:
    """Return what `make` finds out about rows, as JSON holds it. If all of them are indexed, it is kept beside the
    indexes, under what it is (`what`) and the rows; processes that ask at the same time wait for one of them."""
    folder, key = rows.stores[0].cache if rows.stores else None, rows.key
    if folder is None or key is None:
        return make()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{sha256(json.dumps([what, key, version()]).encode()).hexdigest()[:32]}.json"
    with locked(file.with_suffix(".lock"), beat):
        try:
            return json.loads(read_regular(file))
        except (ValueError, OSError):
            found = make()
        new = file.with_suffix(f".{os.getpid()}.tmp")
        new.write_text(json.dumps(found), encoding="utf-8")
        new.replace(file)
    return found


@contextmanager
def locked(file: Path, beat: Callable[[], None]) -> Iterator[None]:
    """Hold a lock of this name; wait while another process holds it. The system frees it if that process dies."""
    with open(file, "ab") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                beat()
                time.sleep(_WAIT_SECONDS)
        yield


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Holds what was read of a part of a file."""

    entries: np.ndarray  # of ENTRY, (rows,)
    ids: bytes
    rejected: list[dict[str, Any]]
    without: Counter[str]


def _make(source: IndexSource, file: Path, new: Path, beat: Callable[[], None]) -> None:
    """Write the index of a file as `new`, and put it in place of one that is there. `new` may be left of a process that
    was killed. The caller holds the lock of both."""
    try:
        of = source.identity()
        shutil.rmtree(file.with_name(source.key), ignore_errors=True)  # indexes were folders
        _remove_unused(file.parent)
        with open(new, "w+b") as stream:
            head = _written(source, stream, beat)
            stream.flush()
            head |= {"version": version(), "of": of, "format": source.format}
            head["checksum"] = zlib.crc32(mapped(new).data) if stream.tell() else 0
            text = json.dumps({**head, "head": _checksum_of(head)}).encode()
            stream.write(text + len(text).to_bytes(_LENGTH_BYTES, "little"))
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)


@cache
def _remove_unused(folder: Path) -> None:
    """Remove the indexes of other versions that nothing has used for long; a process looks once."""
    for file in folder.glob("*.index"):
        with suppress(OSError):
            is_old = time.time() - max(file.stat().st_atime, file.stat().st_mtime) > _UNUSED_SECONDS
            if is_old and _NAME.fullmatch(file.stem) and not file.stem.endswith(version()):
                file.unlink()


def _written(source: IndexSource, stream: BinaryIO, beat: Callable[[], None]) -> dict[str, Any]:
    """Write rows and ids; return what the head says of them."""
    rejected: list[dict[str, Any]] = []
    without: Counter[str] = Counter()
    parts = list(source.parts(beat))
    id_bytes, rows, spoken = 0, 0, time.monotonic()
    with tempfile.SpooledTemporaryFile(_HELD_ID_BYTES, dir=os.path.dirname(stream.name)) as ids:
        for done, part in enumerate(spread(partial(_part, source), parts), start=1):
            beat()
            part.entries["id_offset"] += np.uint64(id_bytes)
            stream.write(part.entries.tobytes())
            ids.write(part.ids)
            rejected += part.rejected
            without.update(part.without)
            id_bytes, rows = id_bytes + len(part.ids), rows + len(part.entries)
            if time.monotonic() - spoken > SAY_SECONDS:
                spoken = time.monotonic()
                logger.info(f"{source.reading.file}: {rows:,} rows indexed, {done / len(parts):.0%} of the file")
        repeats = _without_repeats(stream, ids) if rows else []
        ids.seek(0)
        shutil.copyfileobj(ids, stream)
    rejected = sorted(rejected + repeats, key=lambda each: (each["row"]["line"], each["number"]))
    return {"rows": rows - len(repeats), "id_bytes": id_bytes, "without": list(without.items()), "rejected": rejected}


def _without_repeats(stream: BinaryIO, ids: IO[bytes]) -> list[dict[str, Any]]:
    """Take the rows out whose id an earlier row has; return them as rejected rows. The stream has the rows, and stays
    at their end."""
    stream.flush()
    entries = np.frombuffer(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ), ENTRY)

    def id_of(number: int) -> str:
        ids.seek(int(entries["id_offset"][number]))
        return ids.read(int(entries["id_length"][number])).decode()

    firsts = same_ids(entries["id"], id_of)
    if not firsts:
        return []
    lines, found = entries["line"], []
    for number, first in firsts.items():
        reason = told("repeated id", shortened(id_of(number)), lines[first])
        row = {"id": id_of(number), "line": int(lines[number]), "field": "id", "reason": reason}
        place = {name: int(entries[name][number]) for name in ("offset", "length", "number")}
        found.append({**place, "repeats": True, "row": row})
    is_kept = np.ones(len(entries), dtype=bool)
    is_kept[list(firsts)] = False
    stream.seek(0)
    for first in range(0, len(entries), _AT_ONCE):  # each part is copied before what is written reaches it
        some = slice(first, first + _AT_ONCE)
        stream.write(entries[some][is_kept[some]].tobytes())
    stream.truncate()
    return found


def _part(source: IndexSource, part: Any) -> _Part:
    """Read a part of a file, without the bytes of its pictures if that is possible."""
    try:
        return _read_part(source.without_pictures, part)
    except (PicturesNeeded, DataError, OSError):  # of which the rows that can be read are read, and the others rejected
        return _read_part(source, part)


def _read_part(source: IndexSource, part: Any) -> _Part:
    values: list[tuple[int, ...]] = []
    ids = bytearray()
    rejected: list[dict[str, Any]] = []
    without: Counter[str] = Counter()
    left_out = () if source.has_beginnings else ("beginning",)
    for offset, length, record in source.records(part):
        if source.column_names and record.problem is None:
            without.update(lacking(record, source.column_names))
        for number, row in enumerate(source.rows(record)):
            if isinstance(row, RejectedRow):
                place = {"offset": offset, "length": length, "number": number, "repeats": False}
                rejected.append({**place, "row": _plain(row)})
                continue
            id = row.id.encode()
            values.append((*facts_of(row, left_out), offset, len(ids), length, number, len(id)))
            ids += id
    entries = np.zeros(len(values), ENTRY)  # so that what aligns them is 0 too
    entries[:] = values
    return _Part(entries=entries, ids=bytes(ids), rejected=rejected, without=without)


def _plain(row: RejectedRow) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if name != "file"}
