"""Where tiercel writes for its user: what cannot be written is told with its path, the reason and the remedy."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from tiercel.errors import RunError

ELSEWHERE = "name another place, or make room and rights there"
GO_ON = "make room and rights there; the same command goes on"


@contextmanager
def writing(path: Path | str, remedy: str = ELSEWHERE) -> Iterator[None]:
    """Inside `path`, as a message is to name it, is written. Raises RunError where the system does not allow it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} cannot be written: {_reason(error, path)}; {remedy}") from error


def write_text(path: Path, text: str) -> None:
    """A file of the user's choice, in UTF-8. Raises RunError."""
    with writing(path):
        path.write_text(text, encoding="utf-8")


def _reason(error: Exception, path: Path | str) -> str:
    if isinstance(error, shutil.Error):  # of many files; each has its source, its target and the reason
        return str(error.args[0][0][2])
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    is_elsewhere = error.filename is not None and str(error.filename) != str(path)
    return f"{error.strerror} ({error.filename})" if is_elsewhere else error.strerror
