"""Saving of a run's pictures in a separate thread, so that the step that saw them continues meanwhile.

A picture that a killed process did not get to write is written again: the run resumes from a checkpoint, before which
all pictures are waited for, and later steps are recorded again.
"""

import struct
import zlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from torch import Tensor

from tiercel.regular_files import open_new
from tiercel.writing import GO_ON, writing

MOST_WAITING = 256  # pictures kept in memory
UP, RGB = 2, 2  # PNG's codes of that filter and of that kind of pixels


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
    with writing(path, GO_ON):
        with open_new(temporary, "wb") as file:
            file.write(png(view.numpy()))
        temporary.replace(path)


def png(pixels_YX3: np.ndarray) -> bytes:
    """Encode a picture, uint8, as PNG (https://www.w3.org/TR/png-3/). Each line is the difference from the one above,
    with run-length encoding: a third of the time of Pillow, which tries five filters for each line, and about as small
    for photographs."""
    height, width, _ = pixels_YX3.shape
    lines = pixels_YX3.reshape(height, 3 * width)
    filtered = np.full((height, 1 + 3 * width), UP, dtype=np.uint8)
    filtered[0, 1:] = lines[0]
    np.subtract(lines[1:], lines[:-1], out=filtered[1:, 1:])
    compressor = zlib.compressobj(level=1, strategy=zlib.Z_RLE)
    data = compressor.compress(filtered.data) + compressor.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, RGB, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
