"""Access to the files of a run, whose directory may contain what no run wrote: links, pipes, devices, endless files.

Links are not followed, neither in place of a file nor of a run's folder, because a run reads and writes only inside its
directory.
"""

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

LARGEST_FILE = 1 << 30  # bytes of a file that is read whole
LARGEST_JSON = 1 << 24  # bytes of a file that is one value
LONGEST_LINE = 1 << 27  # bytes
_IN_WORDS = {errno.ELOOP: "is a link, which is not followed", errno.ENXIO: "is not a regular file"}
FOLDERS = {  # of a run
    *("rollouts", "evaluations", "tokens", "images", "checkpoints", "journal"),
    *("policies", "nonfinite", "profiles", "trackers", "stall", "pulse"),
}
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # without waiting for a pipe


class OddFile(OSError):
    """Raised if a file is not one that a run writes. `strerror` says what it is."""

    def __str__(self) -> str:
        return f"{self.filename} {self.strerror}"


def open_regular(file: Path | str, largest: int | None = None) -> IO[bytes]:
    """Open a file for reading. Raises OSError; it is OddFile if the file is a link, not a regular file, or larger than
    `largest` bytes."""
    stream = _file(_opened(file, os.O_RDONLY), file, "rb")
    size = os.fstat(stream.fileno()).st_size
    if largest is not None and size > largest:
        stream.close()
        raise OddFile(errno.EFBIG, f"has {size:,} bytes; at most {largest:,} are read", str(file))
    return stream


def read_regular(file: Path | str, largest: int = LARGEST_FILE) -> bytes:
    """Read a whole file. Raises OSError like `open_regular`."""
    with open_regular(file, largest) as stream:
        return stream.read(largest)


def read_text(file: Path | str, largest: int = LARGEST_FILE) -> str:
    """Read a file as UTF-8, with replacement characters for anything else. Raises OSError like `open_regular`."""
    return read_regular(file, largest).decode("utf-8", errors="replace")


def read_json(file: Path | str, largest: int = LARGEST_JSON) -> Any:
    """Read a file that contains one JSON value. Raises OSError like `open_regular`, and if the file is not JSON or is
    nested too deeply."""
    data = read_regular(file, largest)
    try:
        return json.loads(data)
    except ValueError as error:
        raise OddFile(errno.EINVAL, f"is no JSON ({error})", str(file)) from error
    except RecursionError as error:
        raise OddFile(errno.EINVAL, "is nested too deeply", str(file)) from error


def require_regular(file: Path | str) -> None:
    """Require a regular file before a library opens it by its name, because that would wait for a pipe. Raises OSError
    like `open_regular`."""
    open_regular(file).close()


def lines_of(file: Path | str) -> Iterator[bytes]:
    """Yield the lines of a file. Raises OSError like `open_regular`, and if a line is longer than LONGEST_LINE."""
    with open_regular(file) as stream:
        yield from bounded_lines(stream, file)


def bounded_lines(stream: IO[bytes], file: Path | str) -> Iterator[bytes]:
    """Yield the lines of an open file. Raises OddFile if a line is longer than LONGEST_LINE."""
    while line := stream.readline(LONGEST_LINE + 1):
        if len(line) > LONGEST_LINE:
            raise too_long(file)
        yield line


def too_long(file: Path | str) -> OddFile:
    """Return the error for a line that is too long, as in a sparse file."""
    return OddFile(errno.EFBIG, f"has a line of more than {LONGEST_LINE:,} bytes", str(file))


def open_to_append(file: Path | str) -> IO[str]:
    """Open a text file to append to it, and create it if it does not exist. Raises OSError if it is a link or not a
    regular file."""
    return _file(_opened(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT), file, "a")


def open_new(file: Path | str, mode: str = "w") -> IO[Any]:
    """Create a file for writing in place of anything that has its name: a file left by a killed process, or a link,
    which is removed and not followed. Raises OSError."""
    _require_inside(file)
    with suppress(FileNotFoundError):
        os.unlink(file)
    return _file(_opened(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL), file, mode)


def is_linked(folder: str) -> bool:
    """Return whether a link is in the place of a run's folder."""
    is_link = os.path.basename(folder) in FOLDERS and os.path.islink(folder)
    return is_link and os.path.lexists(os.path.join(os.path.dirname(folder), "config.yaml"))


def _require_inside(file: Path | str) -> None:
    if is_linked(folder := os.path.dirname(file)):
        raise OddFile(errno.ELOOP, _IN_WORDS[errno.ELOOP], folder)


def _opened(file: Path | str, flags: int) -> int:
    _require_inside(file)
    try:
        return os.open(file, flags | _FLAGS, 0o666)
    except OSError as error:
        if (told := _IN_WORDS.get(error.errno or 0)) is None:
            raise
        raise OddFile(error.errno, told, str(file)) from error


def write_new(file: Path | str, text: str) -> None:
    """Write a text file in place of anything that has its name, like `open_new`. Raises OSError."""
    with open_new(file) as stream:
        stream.write(text)


def make_directory(path: Path) -> None:
    """Create a directory if it does not exist. Raises OSError if it is a link, because files would be written
    elsewhere."""
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, "is a link; move what it leads to here", str(path))


def remove(path: Path) -> None:
    """Remove whatever has this name, if anything does: a directory with its contents, a file, or a link, which is not
    followed. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _file(descriptor: int, file: Path | str, mode: str) -> IO[Any]:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OddFile(errno.EINVAL, "is not a regular file", str(file))
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, mode, encoding=None if "b" in mode else "utf-8")
