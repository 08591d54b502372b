"""Tar shards as WebDataset writes them: consecutive members with the same stem are a row. Nothing is unpacked or
unpickled.

    cat.json    the row: an object; without it, the row has the columns below only
    cat.jpg     a picture: of `images`, in the order of the members, or where `images` names it
    cat.txt     text, in the column `txt`
    cat.EXT     bytes, in the column EXT, which rows leave out
"""

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from tiercel.data.records import Record, json_problem, record_of_json
from tiercel.errors import DataError

_BROKEN = (tarfile.TarError, ValueError, OverflowError)  # raised for headers that are no headers
_PICTURES = frozenset({"bmp", "gif", "jpeg", "jpg", "png", "tif", "tiff", "webp"})


def read_tar(file: Path) -> Iterator[Record]:
    """Read a tar shard. Raises DataError if it is not a tar file."""
    with file.open("rb") as stream:
        for line, (offset, length) in enumerate(spans(file), start=1):
            yield record_of_members(os.pread(stream.fileno(), length, offset), line)


def spans(file: Path) -> Iterator[tuple[int, int]]:
    """Yield where the rows of a shard lie: offset and length, in bytes. What cannot be read up to the end of a file is
    one more span. Raises DataError if it is not a tar file."""
    start, end, last, size = 0, 0, None, file.stat().st_size
    try:
        with tarfile.open(file, "r:") as tar:
            for member in _members(tar):
                if not member.isdir():
                    stem = _stem(member.name)
                    if last is not None and stem != last:
                        yield start, member.offset - start
                        start = member.offset
                    last = stem
                end = tar.offset  # beyond the file if it is cut short within this member
    except _BROKEN as error:
        if last is None:
            raise DataError(f"{file}: cannot be read as a tar file: {error}") from error
    with file.open("rb") as stream:
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
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            for member in _members(tar):
                if member.isdir():
                    continue
                if problem := _fault(member):
                    return Record(line=line, problem=f"member {member.name!r} {problem}")
                stem, name = _stem(member.name), PurePosixPath(member.name).name
                if name in contents:
                    return Record(line=line, problem=f"member {member.name!r} is there twice")
                contents[name] = data[member.offset_data : member.offset_data + member.size]
            if tar.offset != len(data):
                raise tarfile.ReadError("it ends too early, or its next header is damaged")
    except _BROKEN as error:
        return Record(line=line, problem=f"the tar file is cut short or damaged here: {error}")
    return _record(stem, contents, line)


def _record(stem: str, contents: dict[str, bytes], line: int) -> Record:
    begin = len(PurePosixPath(stem).name) + 1
    own: dict[str, Any] = {}
    if (text := contents.pop(f"{PurePosixPath(stem).name}.json", None)) is not None:
        record = record_of_json(text, line)
        if record.problem is not None:
            return record
        own = dict(record.value)
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
    return Record(line=line, value={"id": stem, **own})


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    while (member := tar.next()) is not None:
        if member.size < 0 or tar.offset <= member.offset:
            raise tarfile.ReadError("a header gives a size below 0")
        yield member
        tar.members.clear()  # type: ignore[attr-defined]  # otherwise all of them are kept


def _fault(member: tarfile.TarInfo) -> str | None:
    """Return why a member is refused."""
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.sparse is not None:
        return "is a link or another special file, which is refused"
    if member.name.startswith("/") or ".." in member.name.split("/"):
        return "has a path that leads out, which is refused"
    return None


def _stem(name: str) -> str:
    """Return the path up to the first dot of its last part."""
    folder, slash, last = name.rpartition("/")
    return folder + slash + last.partition(".")[0]
