"""Writing of files so that a crash leaves the old file or the new file, never a part of one."""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from tiercel.regular_files import open_new
from tiercel.reliability.redaction import redact, redact_values


def write_atomically(path: Path, text: str) -> None:
    """Write a temporary file, flush it to disk, and rename it over `path`."""
    new = NewFile(path)
    try:
        new.add(text)
        new.finish()
    except OSError:
        new.give_up()
        raise


class NewFile:
    """A file that is written part by part under a temporary name, and gets its own when it is whole."""

    def __init__(self, path: Path):
        self._path, self._temporary = path, path.with_name(path.name + ".tmp")
        self._stream: IO[bytes] | None = None
        self.size = 0

    def add(self, text: str) -> None:
        """Append a part."""
        self._stream = self._stream or open_new(self._temporary, "wb")
        self.size += self._stream.write(text.encode("utf-8"))

    def finish(self) -> None:
        """Flush the file to disk, and rename it over what has its name."""
        self.add("")
        assert self._stream is not None
        with self._stream as stream:
            stream.flush()
            os.fsync(stream.fileno())
        self._temporary.replace(self._path)
        fsync(self._path.parent)

    def give_up(self) -> None:
        """Remove what was written so far."""
        if self._stream is not None:
            with suppress(OSError):
                self._stream.close()
            self._temporary.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Flush a file's bytes, or the renames in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def json_line(values: Mapping[str, Any]) -> str:
    """Format values as one line of JSON without secrets, and with "?" for half of a surrogate pair, which is not text.
    Raises ValueError for NaN and infinities, which JSON does not have."""
    line = json.dumps(values, ensure_ascii=False, allow_nan=False)
    if redact(line) != line:
        line = json.dumps(redact_values(values), ensure_ascii=False, allow_nan=False)
    return line.encode("utf-8", "replace").decode() + "\n"
