"""The pictures of a run, written by a thread of their own: the step that saw them goes on meanwhile.

A picture that a killed process did not come to write is written again: the run resumes from a checkpoint, before which
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

MOST_WAITING = 256  # pictures that are kept in memory


class PictureWriter:
    """Writes pictures in their order. One thread calls it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "pictures")  # which starts with the first picture
        self._waiting: deque[tuple[Path, Future[None]]] = deque()

    def write(self, path: Path, view: Tensor, temporary: Path) -> None:
        """Write a picture soon, where it is not there yet: at first as `temporary`. Raises RunError where an earlier
        one could not be written."""
        while self._waiting and (self._waiting[0][1].done() or len(self._waiting) >= MOST_WAITING):
            self._waiting.popleft()[1].result()
        if all(path != other for other, _ in self._waiting) and not path.exists():
            self._waiting.append((path, self._thread.submit(_write, path, view, temporary)))

    def finish(self) -> None:
        """Wait until all are written. Raises RunError where one could not be."""
        while self._waiting:
            self._waiting.popleft()[1].result()


def _write(path: Path, view: Tensor, temporary: Path) -> None:
    """Write a PNG by runs of equal bytes: a third of the time of zlib's default, and about as small for photographs."""
    with writing(path, GO_ON):
        with open_new(temporary, "wb") as file:
            picture_image(view).save(file, format="PNG", compress_level=1, compress_type=zlib.Z_RLE)
        temporary.replace(path)
