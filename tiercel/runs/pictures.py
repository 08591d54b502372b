"""Pictures of a run, as the pages show them, and the thread that writes files while the step continues.

What a killed process did not get to write is written again: the run resumes from a checkpoint, before which all files
are waited for, and later steps are recorded again. Imports no torch.
"""

import io
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from tiercel.regular_files import open_new
from tiercel.reward_types import Size
from tiercel.writing import GO_ON, writing

if TYPE_CHECKING:  # a report needs no numpy
    import numpy as np

MOST_WAITING = 256  # pictures kept in memory
LONGEST_SIDE = 448  # pixels that a page shows
QUALITY, EFFORT = 60, 6  # of WebP
_VISIBLE_BELOW = 160  # pixels: smaller pictures are kept without loss, and shown with visible pixels


class Background:
    """Runs actions in order. Only one thread may call it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "files")  # starts with the first action
        self._waiting: deque[tuple[Path | None, Future[None]]] = deque()

    def do(self, action: Callable[[], None], path: Path | None = None) -> None:
        """Run an action soon, unless `path` exists or another action will write it. Raises RunError if an earlier
        action failed."""
        while self._waiting and (self._waiting[0][1].done() or len(self._waiting) >= MOST_WAITING):
            self._waiting.popleft()[1].result()
        if path is None or (all(path != other for other, _ in self._waiting) and not path.exists()):
            self._waiting.append((path, self._thread.submit(action)))

    def finish(self) -> None:
        """Wait until all is done. Raises RunError if an action failed."""
        while self._waiting:
            self._waiting.popleft()[1].result()


def write_picture(path: Path, view_YX3: "np.ndarray", temporary: Path) -> None:
    """Write what the model saw, uint8, as a page shows it, first under another name. Raises RunError."""
    with writing(path, GO_ON):
        with open_new(temporary, "wb") as file:
            file.write(webp(Image.fromarray(view_YX3)))
        temporary.replace(path)


def webp(picture: Image.Image) -> bytes:
    """Encode an RGB picture at the size of a page, which it is reduced to."""
    picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    picture.save(stream, "WEBP", quality=QUALITY, method=EFFORT, lossless=has_visible_pixels(picture.size))
    return stream.getvalue()


def has_visible_pixels(size: Size) -> bool:
    """Whether a picture is so small that it is shown without smoothing."""
    return max(size) < _VISIBLE_BELOW


def picture_file(folder: Path, sha256: str) -> Path:
    """Return the file of a picture in images/, which older versions wrote as PNG in its whole size."""
    older = folder / f"{sha256}.png"
    return older if os.path.lexists(older) else folder / f"{sha256}.webp"
