"""Tar shards as WebDataset writes them: consecutive members with the same stem are a row. Nothing is unpacked or
unpickled.

    cat.json    the row: an object; without it, the row has the columns below only
    cat.jpg     a picture: of `images`, in the order of the members, or where `images` names it
    cat.txt     text, in the column `txt`
    cat.EXT     bytes, in the column EXT, which rows leave out
"""

import io
import json
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tiercel.data.formats.message_parts import CONTENT, IN_ORDER
from tiercel.data.media.file_names import visual_of
from tiercel.data.records import Record, json_problem, record_of_json
from tiercel.errors import DataError

_BROKEN = (tarfile.TarError, ValueError, OverflowError)  # raised for headers that are no headers
_KEPT_BYTES = 1 << 23
_NO_FILE = "is a link or another special file, which is refused"
_PICTURES = frozenset({"bmp", "gif", "jpeg", "jpg", "png", "tif", "tiff", "webp"})
_OCTAL = re.compile(rb"0*([0-7]+)[ \0]*")
_ABSOLUTE = re.compile(rb'"((?:/|[A-Za-z]:)(?:[^"\\]|\\.)*)"')  # a path, in JSON


def read_tar(file: Path) -> Iterator[Record]:
    """Read a tar shard. Raises DataError if it is not a tar file."""
    return (record for _, _, record in placed_records(file))


def placed_records(file: Path) -> Iterator[tuple[int, int, Record]]:
    """Yield the offset and the length of each row of a shard, in bytes, and its record. Raises DataError if it is not a
    tar file."""
    status = file.stat()
    if status.st_size <= _KEPT_BYTES:
        yield from _kept(file, (status.st_ino, status.st_size, status.st_mtime_ns))
        return
    with file.open("rb", buffering=0) as stream:  # a header at a time, not a buffer
        yield from _placed(_rows(file, stream), lambda start, length: os.pread(stream.fileno(), length, start))


@lru_cache(maxsize=1)
def _kept(file: Path, _state: tuple[int, ...]) -> tuple[tuple[int, int, Record], ...]:
    """Read a small shard. The last one is kept, because a first start asks for its format and then for its rows."""
    data = file.read_bytes()
    return tuple(_placed(_rows(file, io.BytesIO(data)), lambda start, length: data[start : start + length]))


def _placed(
    rows: Iterable[tuple[int, int, list["_Member"]]], read: Callable[[int, int], bytes]
) -> Iterator[tuple[int, int, Record]]:
    for line, (start, length, members) in enumerate(rows, start=1):
        data = read(start, length)
        is_known = members and all(member.is_plain for member in members)
        record = _record_of(members, data, start, line) if is_known else record_of_members(data, line)
        yield start, length, record


def spans(file: Path) -> Iterator[tuple[int, int]]:
    """Yield where the rows of a shard lie: offset and length, in bytes. What cannot be read up to the end of a file is
    one more span. Raises DataError if it is not a tar file."""
    with file.open("rb", buffering=0) as stream:
        yield from ((start, length) for start, length, _ in _rows(file, stream))


def _rows(file: Path, stream: BinaryIO) -> Iterator[tuple[int, int, list["_Member"]]]:
    """Yield the offset, the length and the members of each row; what cannot be read has none."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    start, end, last = 0, 0, None
    row: list[_Member] = []
    try:
        for member in _members(stream):
            if not member.is_left_out:
                if last is not None and member.stem != last:
                    yield start, member.offset - start, row
                    start, row = member.offset, []
                last = member.stem
            row.append(member)
            end = member.end  # beyond the file if it is cut short within this member
    except _BROKEN as error:
        if last is None:
            raise DataError(f"{file}: cannot be read as a tar file: {error}") from error
    stream.seek(end)
    is_whole = stream.read(tarfile.BLOCKSIZE) == bytes(tarfile.BLOCKSIZE)
    if last is not None and (is_whole or end <= size):
        yield start, end - start, row
        start = end
    if not is_whole:
        yield start, size - start, []


def record_of_members(data: bytes, line: int) -> Record:
    """Read a row of its members, as they stand in the file."""
    try:
        members = list(_members(io.BytesIO(data)))
        if not members or members[-1].end != len(data):
            raise tarfile.ReadError("it ends too early, or its next header is damaged")
    except _BROKEN as error:
        return Record(line=line, problem=f"the tar file is cut short or damaged here: {error}")
    return _record_of(members, data, 0, line)


def _record_of(members: Sequence["_Member"], data: bytes, first: int, line: int) -> Record:
    """Read a row of members whose places are counted from `first` bytes before its data."""
    contents: dict[str, bytes] = {}
    stem = ""
    for member in members:
        if member.is_left_out:
            continue
        if member.problem is not None:
            return Record(line=line, problem=f"member {member.name!r} {member.problem}")
        stem, name = member.stem, member.file_name
        if name in contents:
            return Record(line=line, problem=f"member {member.name!r} is there twice")
        contents[name] = data[member.start - first : member.start - first + member.size]
    return _record(stem, contents, line)


def _record(stem: str, contents: dict[str, bytes], line: int) -> Record:
    base = stem.rpartition("/")[2]
    begin = len(base) + 1
    own: dict[str, Any] = {}
    is_plain = stem.isascii()
    if (text := contents.pop(f"{base}.json", None)) is not None:
        record = record_of_json(text, line)
        if record.problem is not None:
            return record
        own, is_plain = dict(record.value), is_plain and record.is_plain
    pictures = {}
    for name, data in contents.items():
        column = name[begin:]
        ending = column.rpartition(".")[2].lower()
        if ending in _PICTURES:
            pictures[name] = {"bytes": data, "path": name}
        elif column in own:
            return Record(line=line, problem=f"has {column!r} both as a key of its JSON and as a member")
        else:
            try:
                own[column] = data.decode() if ending == "txt" else data
                is_plain = is_plain and ending == "txt" and column.isascii()
            except UnicodeDecodeError as error:
                return Record(line=line, problem=f"member {name!r} {json_problem(error)}")
    if pictures and (problem := _place_pictures(own, pictures, stem[: -len(base)], text or b"")) is not None:
        return Record(line=line, problem=problem)
    return Record(line=line, value={"id": stem, **own}, is_plain=is_plain)


def _place_pictures(own: dict[str, Any], pictures: Mapping[str, Any], folder: str, text: bytes) -> str | None:
    """Put the pictures of a row where its JSON (`text`, read as `own`) names them, by their names or their whole paths,
    or by the absolute paths that only they can mean, or else in `images`. Return what is wrong, if anything is."""
    key = "image" if own.get("images") is None else "images"
    named = own.get(key)
    is_escaped = b"\\" in text
    if named is None and not any(n.encode() in text or (is_escaped and _in_json(n) in text) for n in pictures):
        own["images"] = list(pictures.values())
        return None
    by_path = {f"{folder}{name}": each for name, each in pictures.items()} | dict(pictures)
    elsewhere: dict[str, set[str]] = {}  # absolute paths in the JSON, by the names at their ends
    for found in _ABSOLUTE.findall(text):
        path = json.loads(b'"%s"' % found)
        elsewhere.setdefault(re.split(r"[/\\]", path)[-1], set()).add(path)
    by_path |= {path: pictures[name] for name, (path, *others) in elsewhere.items() if name in pictures and not others}
    used = list[Any]()
    if named is None:
        turns = {name: own[name] for name in IN_ORDER if isinstance(own.get(name), list)}
        own |= {name: [_with_members(turn, by_path, used) for turn in value] for name, value in turns.items()}
    if named is None and not used:
        own["images"] = list(pictures.values())
        return None
    many = named if isinstance(named, list) else [named]
    used += [by_path[each] for each in many if isinstance(each, str) and each in by_path]
    if unnamed := next((name for name, each in pictures.items() if each not in used), None):
        return f"its JSON names images, but not the member {unnamed!r}; name all of them, or none"
    if named is not None:
        found = [by_path.get(each, each) if isinstance(each, str) else each for each in many]
        own[key] = found if isinstance(named, list) else found[0]
    return None


def _in_json(name: str) -> bytes:
    return json.dumps(name)[1:-1].encode()


def _with_members(turn: Any, pictures: Mapping[str, Any], used: list[Any]) -> Any:
    """Put members in place of their names in the parts of a turn, and add them to `used`."""
    if not isinstance(turn, dict):
        return turn
    contents = {key: turn[key] for key in CONTENT if isinstance(turn.get(key), list)}
    return {**turn, **{key: [_with_member(part, pictures, used) for part in parts] for key, parts in contents.items()}}


def _with_member(part: Any, pictures: Mapping[str, Any], used: list[Any]) -> Any:
    if not isinstance(part, dict):
        return part
    for key in visual_of(part)[1]:
        name = part[key].get("url") if isinstance(part.get(key), dict) else part.get(key)
        if isinstance(name, str) and name in pictures:
            used.append(pictures[name])
            return {"type": "image", "image": pictures[name]}
    return part


class _Member(NamedTuple):
    """Describes a member of a tar file: where its headers begin, where its content begins and where the next member
    does, in bytes. A named tuple is made in a third of the time of a frozen dataclass, and there is one for each
    header."""

    name: str
    stem: str  # the path up to the first dot of its last part
    file_name: str  # the last part of the path
    offset: int
    start: int
    size: int
    end: int
    is_left_out: bool  # it belongs to no row: a folder, or a file such as macOS's ._cat.jpg beside cat.jpg
    problem: str | None  # why it is refused
    is_plain: bool  # nothing but its header was needed to read it


def _member(
    name: str,
    places: tuple[int, int, int, int],
    problem: str | None,
    *,
    is_folder: bool = False,
    is_plain: bool = False,
) -> _Member:
    """Describe a member by its path and its places: `offset`, `start`, `size` and `end`."""
    folder, slash, last = name.rpartition("/")
    stem = folder + slash + last.partition(".")[0]
    return _Member(name, stem, last, *places, is_folder or last.startswith("."), problem, is_plain)


def _members(stream: BinaryIO) -> Iterator[_Member]:
    """Yield the members of a tar file. Plain headers, which nearly all are, are read here, three times as fast as by
    tarfile, which reads the others."""
    offset = 0
    while (plain := _plain_header(block := stream.read(tarfile.BLOCKSIZE))) is not None:
        name, size = plain
        start = offset + tarfile.BLOCKSIZE
        end = start + -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        yield _member(name, (offset, start, size, end), _path_problem(name), is_plain=True)
        offset = stream.seek(end)
    if offset and not block.strip(b"\0"):
        return
    stream.seek(offset)
    with tarfile.open(fileobj=stream, mode="r:") as tar:
        while (found := tar.next()) is not None:
            if found.size < 0 or tar.offset <= found.offset:
                raise tarfile.ReadError("a header gives a size below 0")
            is_plain_file = found.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and found.sparse is None
            problem = _path_problem(found.name) if is_plain_file else _NO_FILE
            places = found.offset, found.offset_data, found.size, tar.offset
            yield _member(found.name, places, problem, is_folder=found.isdir())
            tar.members.clear()  # type: ignore[attr-defined]  # otherwise all of them are kept


def _plain_header(block: bytes) -> tuple[str, int] | None:
    """Return the name and the size that a header gives, if it is that of a file with a short name and nothing else is
    to be known; see tar(5)."""
    if len(block) < tarfile.BLOCKSIZE or block[156:157] not in (tarfile.REGTYPE, tarfile.AREGTYPE) or block[345]:
        return None
    if not (size := _OCTAL.fullmatch(block, 124, 136)) or not (checksum := _OCTAL.fullmatch(block, 148, 156)):
        return None
    content = block[:148] + b" " * 8 + block[156:]
    if zlib.adler32(content, 0) & 0xFFFF != int(checksum[1], 8):  # the sum of the bytes, modulo 65,521
        return None
    name = block[:100].split(b"\0", 1)[0]
    return (name.decode(), int(size[1], 8)) if name.isascii() and not name.endswith(b"/") else None


def _path_problem(name: str) -> str | None:
    if name.startswith("/") or ".." in name.split("/"):
        return "has a path that leads out, which is refused"
    return None
