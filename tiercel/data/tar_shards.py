"""Tar shards as WebDataset writes them: consecutive members with the same stem are a row. Nothing is unpacked or
unpickled.

    cat.json    the row: an object; without it, the row has the columns below only
    cat.jpg     a picture: of `images`, in the order of the members, or where `images` names it
    cat.txt     text, in the column `txt`
    cat.EXT     bytes, in the column EXT, which rows leave out
"""

import io
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tiercel.data.records import Record, json_problem, record_of_json
from tiercel.errors import DataError

_BROKEN = (tarfile.TarError, ValueError, OverflowError)  # raised for headers that are no headers
_PICTURES = frozenset({"bmp", "gif", "jpeg", "jpg", "png", "tif", "tiff", "webp"})
_OCTAL = re.compile(rb"0*([0-7]+)[ \0]*")


def read_tar(file: Path) -> Iterator[Record]:
    """Read a tar shard. Raises DataError if it is not a tar file."""
    with file.open("rb") as stream:
        for line, (offset, length) in enumerate(spans(file), start=1):
            yield record_of_members(os.pread(stream.fileno(), length, offset), line)


def spans(file: Path) -> Iterator[tuple[int, int]]:
    """Yield where the rows of a shard lie: offset and length, in bytes. What cannot be read up to the end of a file is
    one more span. Raises DataError if it is not a tar file."""
    start, end, last, size = 0, 0, None, file.stat().st_size
    with file.open("rb", buffering=0) as stream:  # a header at a time, not a buffer
        try:
            for member in _members(stream):
                if not member.is_left_out:
                    stem = _stem(member.name)
                    if last is not None and stem != last:
                        yield start, member.offset - start
                        start = member.offset
                    last = stem
                end = member.end  # beyond the file if it is cut short within this member
        except _BROKEN as error:
            if last is None:
                raise DataError(f"{file}: cannot be read as a tar file: {error}") from error
        is_whole = os.pread(stream.fileno(), tarfile.BLOCKSIZE, end) == bytes(tarfile.BLOCKSIZE)
    if last is not None and (is_whole or end <= size):
        yield start, end - start
        start = end
    if not is_whole:
        yield start, size - start


def record_of_members(data: bytes, line: int) -> Record:
    """Read a row of its members, as they stand in the file."""
    contents: dict[str, bytes] = {}
    stem = ""
    end = 0
    try:
        for member in _members(io.BytesIO(data)):
            end = member.end
            if member.is_left_out:
                continue
            if member.problem is not None:
                return Record(line=line, problem=f"member {member.name!r} {member.problem}")
            stem, name = _stem(member.name), member.name.rpartition("/")[2]
            if name in contents:
                return Record(line=line, problem=f"member {member.name!r} is there twice")
            contents[name] = data[member.start : member.start + member.size]
        if end != len(data):
            raise tarfile.ReadError("it ends too early, or its next header is damaged")
    except _BROKEN as error:
        return Record(line=line, problem=f"the tar file is cut short or damaged here: {error}")
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
    named = own.get("images", own.get("image"))
    if named is None and pictures:
        own["images"] = list(pictures.values())
    elif pictures:
        many = named if isinstance(named, list) else [named]
        if unnamed := next((name for name in pictures if name not in many), None):
            problem = f"its JSON names images, but not the member {unnamed!r}; name all of them, or none"
            return Record(line=line, problem=problem)
        key = "images" if "images" in own else "image"
        found = [pictures.get(each, each) if isinstance(each, str) else each for each in many]
        own[key] = found if isinstance(named, list) else found[0]
    return Record(line=line, value={"id": stem, **own}, is_plain=is_plain)


@dataclass(frozen=True, slots=True)
class _Member:
    """Describes a member of a tar file: where its headers begin, where its content begins and where the next member
    does, in bytes."""

    name: str
    offset: int
    start: int
    size: int
    end: int
    is_folder: bool = False
    problem: str | None = None  # why it is refused

    @property
    def is_left_out(self) -> bool:
        """Return whether it belongs to no row: a folder, or a file such as macOS's ._cat.jpg beside cat.jpg."""
        return self.is_folder or self.name.rpartition("/")[2].startswith(".")


def _members(stream: BinaryIO) -> Iterator[_Member]:
    """Yield the members of a tar file. Plain headers, which nearly all are, are read here, three times as fast as by
    tarfile, which reads the others."""
    offset = 0
    while (plain := _plain_header(block := stream.read(tarfile.BLOCKSIZE))) is not None:
        name, size = plain
        start = offset + tarfile.BLOCKSIZE
        end = start + -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        yield _Member(name, offset, start, size, end, problem=_path_problem(name))
        offset = stream.seek(end)
    if offset and not block.strip(b"\0"):
        return
    stream.seek(offset)
    with tarfile.open(fileobj=stream, mode="r:") as tar:
        while (found := tar.next()) is not None:
            if found.size < 0 or tar.offset <= found.offset:
                raise tarfile.ReadError("a header gives a size below 0")
            problem = _kind_problem(found) or _path_problem(found.name)
            yield _Member(found.name, found.offset, found.offset_data, found.size, tar.offset, found.isdir(), problem)
            tar.members.clear()  # type: ignore[attr-defined]  # otherwise all of them are kept


def _plain_header(block: bytes) -> tuple[str, int] | None:
    """Return the name and the size that a header gives, if it is that of a file with a short name and nothing else is
    to be known; see tar(5)."""
    if len(block) < tarfile.BLOCKSIZE or block[156:157] not in (tarfile.REGTYPE, tarfile.AREGTYPE) or block[345]:
        return None
    if not (size := _OCTAL.fullmatch(block, 124, 136)) or not (checksum := _OCTAL.fullmatch(block, 148, 156)):
        return None
    if sum(block) - sum(block[148:156]) + 8 * ord(" ") != int(checksum[1], 8):
        return None
    name = block[:100].split(b"\0", 1)[0]
    return (name.decode(), int(size[1], 8)) if name.isascii() and not name.endswith(b"/") else None


def _kind_problem(member: tarfile.TarInfo) -> str | None:
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.sparse is not None:
        return "is a link or another special file, which is refused"
    return None


def _path_problem(name: str) -> str | None:
    if name.startswith("/") or ".." in name.split("/"):
        return "has a path that leads out, which is refused"
    return None


def _stem(name: str) -> str:
    """Return the path up to the first dot of its last part."""
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(".")[0]
