"""Files of JSON lines that grow with a run: they are read from their end, and cut without reading what stays.

Imports no torch.
"""

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

from tiercel.regular_files import LONGEST_LINE, lines_of, open_regular, too_long
from tiercel.runs.files import replacing

BLOCK_BYTES = 1 << 16
LINES_BYTES = 1 << 20
LONGEST_BLOCKS = 128  # for one line


def lines_from_end(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the offset of the first byte of each line and the line, from the last line to the first. Only the last line
    may lack its newline. Raises OSError, for example if a line is longer than LONGEST_LINE."""
    with open_regular(file) as stream:
        place, tail = stream.seek(0, os.SEEK_END), b""
        while place > 0:
            if len(tail) > LONGEST_LINE:
                raise too_long(file)
            size = min(max(BLOCK_BYTES, len(tail)), place)
            place -= size
            stream.seek(place)
            tail = stream.read(size) + tail
            first, *lines = tail.splitlines(keepends=True)
            start = place + len(tail)
            for line in reversed(lines):
                start -= len(line)
                yield start, line
            tail = first
        if tail:
            yield 0, tail


def blocks_of_lines(stream: IO[bytes], stop: int | None = None) -> Iterator[bytes]:
    """Yield whole lines from the file's current position, about a megabyte at a time; at the end also a last line
    without a newline. `stop` is the offset to end at. Raises OSError, for example if a line is longer than
    LONGEST_BLOCKS megabytes."""
    place, rest = stream.tell(), list[bytes]()
    while block := stream.read(LINES_BYTES if stop is None else min(LINES_BYTES, stop - place)):
        place += len(block)
        whole, newline, last = block.rpartition(b"\n")
        if newline:
            yield b"".join([*rest, whole, newline])
            rest = []
        rest.append(last)
        if len(rest) > LONGEST_BLOCKS:
            raise OSError(errno.EFBIG, f"has a line of more than {LONGEST_BLOCKS * LINES_BYTES:,} bytes", stream.name)
    if last := b"".join(rest):
        yield last


def cut_lines(file: Path, last_step: int, new_end: bytes = b"") -> None:
    """Remove the lines after the last one whose step is at most `last_step`, if there is a file, and put `new_end` in
    their place. The file is replaced as a whole, and only if something changes. Raises OSError."""
    if not os.path.lexists(file):
        return
    size, stop, newline = file.lstat().st_size, 0, b""
    for start, line in lines_from_end(file):
        row = parsed(line)
        if isinstance(row, dict) and type(row.get("step")) is int and row["step"] <= last_step:
            stop, newline = start + len(line), b"" if line.endswith(b"\n") else b"\n"
            break
    if stop == size and not newline and not new_end:
        return
    with open_regular(file) as old, replacing(file) as new:
        while block := old.read(min(LINES_BYTES, stop - old.tell())):
            new.write(block)
        new.write(newline + new_end)


def parsed(line: bytes | str) -> Any:
    """Return the value of a line, or None if it is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


class Rows(Sequence[Mapping[str, Any]]):
    """The rows of metrics.jsonl, each read when it is requested. Lines that are not JSON objects are skipped."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        if os.path.lexists(self._file):
            yield from (row for line in lines_of(self._file) if isinstance(row := parsed(line), dict))

    def newest(self, count: int) -> list[Mapping[str, Any]]:
        """Return the last `count` rows in the order of the file."""
        if not os.path.lexists(self._file):
            return []
        backwards = (parsed(line) for _, line in lines_from_end(self._file))
        found: list[Mapping[str, Any]] = list(islice((row for row in backwards if isinstance(row, dict)), count))
        return found[::-1]

    def __bool__(self) -> bool:
        return bool(self.newest(1))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, index: Any) -> Any:
        if index == -1:
            return self.newest(1)[0]
        if isinstance(index, slice) and (index.start or 0) < 0 and index.stop is index.step is None:
            return self.newest(-index.start)
        return list(self)[index]
