"""Saving of a run's pictures in a separate thread, so that the step that saw them continues meanwhile.

A picture that a killed process did not get to write is written again: the run resumes from a checkpoint, before which
all pictures are waited for, and later steps are recorded again.
"""

import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from tiercel.models.families.image_transforms import picture_image
from tiercel.regular_files import open_new
from tiercel.writing import GO_ON, writing

MOST_WAITING = 256  # pictures kept in memory


class PictureWriter:
    """Writes pictures in order. Only one thread may call it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "pictures")  # starts with the first picture
        self._waiting: deque[tuple[Path, Future[None]]] = deque()

    def write(self, path: Path, view: Tensor, temporary: Path) -> None:
        """Write a picture soon unless it exists, first under the name `temporary`. Raises RunError if an earlier one
        could not be written."""
        while self._waiting and (self._waiting[0][1].done() or len(self._waiting) >= MOST_WAITING):
            self._waiting.popleft()[1].result()
        if all(path != other for other, _ in self._waiting) and not path.exists():
            self._waiting.append((path, self._thread.submit(_write, path, view, temporary)))

    def finish(self) -> None:
        """Wait until all pictures are written. Raises RunError if one could not be written."""
        while self._waiting:
            self._waiting.popleft()[1].result()


def _write(path: Path, view: Tensor, temporary: Path) -> None:
    """Write a PNG with run-length encoding, which takes a third of the time of zlib's default and is about as small for
    photographs."""
    with writing(path, GO_ON):
        with open_new(temporary, "wb") as file:
            picture_image(view).save(file, format="PNG", compress_level=1, compress_type=zlib.Z_RLE)
        temporary.replace(path)
