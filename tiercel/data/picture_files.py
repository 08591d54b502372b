"""Detect whether the picture files of the rows exist, and whether they are still those that a run began with."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache, partial
from hashlib import sha256

from tiercel.data.index import remembered
from tiercel.data.media.images import resolve
from tiercel.data.rows import reject
from tiercel.data.stores import view_of
from tiercel.errors import DataError
from tiercel.types import ImageRoots, ImageSource, RejectedRow, Row

_FEW_NAMES = 64  # of one directory; each is asked for by itself, and more of them by listing the directory
MOST_ROWS = 4096  # the most rows whose pictures are read, spread evenly; this takes less than a second
_PIECE = 1 << 12  # bytes at the beginning and end; a PNG has a checksum of its pixels at the end


def files_of(side: Row) -> Iterator[tuple[str, ImageRoots]]:
    """Yield the picture and video files of a row, or of one side of a pair, with the directories to look for them
    in."""
    for picture in _pictures(side):
        if picture.data is None and picture.path is not None:
            yield picture.path, side.image_roots


def _pictures(side: Row) -> Iterator[ImageSource]:
    yield from side.images
    for video in side.videos:
        yield from video.frames or [ImageSource(path=video.path)]


def beginning(path: str, roots: ImageRoots, *, with_end: bool = False) -> bytes:
    """Return the size and the first bytes of a file, and the last ones too if `with_end` is set; empty if the file
    cannot be read, in which case its row is left out anyway."""
    try:
        file = resolve(path, roots)
        size = file.stat().st_size
        with file.open("rb") as opened:
            read = f"{size} ".encode() + opened.read(_PIECE)
            if with_end and size > _PIECE:
                opened.seek(size - _PIECE)
                read += opened.read(_PIECE)
        return read
    except (DataError, OSError):
        return b""


def digest_of_pictures(rows: Sequence[Row], beat: Callable[[], None] = lambda: None) -> str:
    """Return a digest of the sizes, beginnings and ends of the pictures of up to MOST_ROWS rows, both in files and
    embedded in rows. Of indexed rows that name no files, it is kept with their index."""
    found = cache(partial(_digest, rows, beat))
    kept = remembered(view_of(rows), "pictures", lambda: None if found()[1] else found()[0], beat)
    return kept or found()[0]


def _digest(rows: Sequence[Row], beat: Callable[[], None]) -> tuple[str, bool]:
    """Return the digest, and whether any of the rows names a file."""
    found, seen = sha256(), set[tuple[str, ImageRoots]]()
    count, view = min(len(rows), MOST_ROWS), view_of(rows)
    read = (view.look(number * len(rows) // count) for number in range(count))
    for side in (side for row in read if isinstance(row, Row) for side in row.sides):
        beat()
        for data in (picture.data for picture in _pictures(side) if picture.data is not None):
            found.update(f"{len(data)} ".encode() + data[:_PIECE] + data[-_PIECE:])
        new = [file for file in files_of(side) if file not in seen]
        seen.update(new)
        for path, roots in new:
            found.update(beginning(path, roots, with_end=True))
    return found.hexdigest()[:16], bool(seen)


def missing_files(rows: Iterable[Row], beat: Callable[[], None] = lambda: None) -> list[RejectedRow]:
    """Return a RejectedRow for each row that names a picture or video file that does not exist. No file is opened."""
    wanted: dict[str, dict[tuple[str, ImageRoots], list[Row]]] = {}  # directory -> files -> the rows that name them
    for row in rows:
        beat()
        for side in row.sides:
            for path, roots in files_of(side):
                directory = os.path.dirname(os.path.join(roots.base, path))
                wanted.setdefault(directory, {}).setdefault((path, roots), []).append(row)
    lost: dict[tuple[str, str], RejectedRow] = {}
    for directory, files in wanted.items():
        beat()
        present = _present(directory, {os.path.basename(path) for path, _ in files})
        for (path, roots), naming in files.items():
            if os.path.basename(path) in present:
                continue
            beat()
            try:
                resolve(path, roots)
            except DataError as error:
                lost.update({(row.file, row.id): reject(row, error) for row in naming})
    return sorted(lost.values(), key=lambda row: (row.file, row.line))


def _present(directory: str, names: Collection[str]) -> set[str]:
    """Return those of the names that are files of a directory."""
    if len(names) < _FEW_NAMES:
        return {name for name in names if os.path.isfile(os.path.join(directory, name))}
    try:
        with os.scandir(directory) as entries:
            return {entry.name for entry in entries if entry.name in names and entry.is_file()}
    except OSError:
        return set()
