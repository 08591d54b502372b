"""Writing of files for the user. If a file cannot be written, the error has its path, the reason and the remedy."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from tiercel.errors import RunError
from tiercel.regular_files import OddFile

ELSEWHERE = "name another place, or free some space there or make it writable"
_UMASK = os.umask(0o077)  # it can be read only by setting it
os.umask(_UMASK)
NOT_OURS = "this is not what the run wrote; restore the original file or move this one away"
GO_ON = "free some space there or make it writable; then run the same command again to resume"


@contextmanager
def writing(path: Path | str, remedy: str = ELSEWHERE) -> Iterator[None]:
    """Wrap code that writes `path`. Raises RunError, which names `path`, if the system does not allow it."""
    try:
        yield
    except OddFile as error:  # a file that the code would have read or overwritten
        raise RunError(f"{error}; {NOT_OURS}") from error
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} cannot be written: {_reason(error, path)}; {remedy}") from error


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Wrap code that reads a file of a run. Raises RunError, which names the file, if it cannot be read."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        reason = f"{reason}; {NOT_OURS}" if isinstance(error, OddFile) else reason
        raise RunError(f"{error.filename or path}: cannot be read: {reason}") from error


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8. Raises RunError if it cannot be written."""
    with writing(path):
        path.write_text(text, encoding="utf-8")


def let_others_read(directory: Path) -> None:
    """Give all files the mode of new ones: safetensors makes its files readable only for their owner, and a server may
    run as another user."""
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(0o666 & ~_UMASK)


def _reason(error: Exception, path: Path | str) -> str:
    if isinstance(error, shutil.Error):  # a list of (source, target, reason), one for each file that failed
        return str(error.args[0][0][2])
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    is_elsewhere = error.filename is not None and str(error.filename) != str(path)
    return f"{error.strerror} ({error.filename})" if is_elsewhere else error.strerror
