"""Writing of files so that a crash leaves the old file or the new file, never a part of one."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tiercel.errors import TakenError
from tiercel.regular_files import open_new
from tiercel.reliability.redaction import redact, redact_values


def write_atomically(path: Path, text: str) -> None:
    """Write a temporary file, flush it to disk, and rename it over `path`."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


@contextmanager
def replacing(path: Path, temporary: Path | None = None) -> Iterator[IO[bytes]]:
    """Yield a file with a temporary name, by default that of `path` and .tmp, which at the end is flushed to disk and
    renamed over `path`. It is removed if that fails, or the code inside does, unless another process has taken over the
    run."""
    temporary = temporary or path.with_name(path.name + ".tmp")
    file = open_new(temporary, "wb")
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync(path.parent)
    except TakenError:
        raise  # the file of this name may be the other process's
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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
