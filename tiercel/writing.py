"""Write files for the user. Where a file cannot be written, the error has its path, the reason and the remedy."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from tiercel.errors import RunError

ELSEWHERE = "name another place, or free some space there and allow writing"
GO_ON = "free some space there and allow writing; then give the same command again, which goes on"


@contextmanager
def writing(path: Path | str, remedy: str = ELSEWHERE) -> Iterator[None]:
    """Wrap code that writes `path`. Raises RunError, which names `path`, where the system does not allow it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path} cannot be written: {_reason(error, path)}; {remedy}") from error


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8. Raises RunError where it cannot be written."""
    with writing(path):
        path.write_text(text, encoding="utf-8")


def _reason(error: Exception, path: Path | str) -> str:
    if isinstance(error, shutil.Error):  # a list of (source, target, reason), one for each file that failed
        return str(error.args[0][0][2])
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    is_elsewhere = error.filename is not None and str(error.filename) != str(path)
    return f"{error.strerror} ({error.filename})" if is_elsewhere else error.strerror
