"""Pictures of a run, embedded in the page up to a limit of number and bytes."""

import base64
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from tiercel.regular_files import LARGEST_FILE, open_regular
from tiercel.runs.pictures import has_visible_pixels, picture_file, webp

MOST_IMAGES = 60
MOST_PIXELS = 1 << 25  # of a picture of a run, which has the size that the model got; a file of 170 kB may have 5 times
MOST_IMAGE_BYTES = 4_000_000  # in the page, as base64
PART_IMAGE_BYTES = 600_000  # of the pictures that came back between turns, in each part of the page

# Of a file that is not a picture, or a broken or too large one.
UNREADABLE = (
    *(OSError, EOFError, ValueError, SyntaxError, TypeError, LookupError, OverflowError),
    *(struct.error, zlib.error, Image.DecompressionBombError),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Embedded:
    """A picture as it is on the page."""

    href: str  # a data: URI, or "#id" of the place that has it already
    is_small: bool  # shown with visible pixels
    id: str | None = None


@dataclass(kw_only=True, slots=True)
class _PictureLimit:
    """What the page may still take."""

    images: int
    size: int  # characters


class Album:
    """The run's images as data: URIs, each once on the page. It counts how much the page may still take."""

    def __init__(self, folder: Path, most_images: int = MOST_IMAGES, most_bytes: int = MOST_IMAGE_BYTES):
        self._folder = folder
        self._room = _PictureLimit(images=most_images, size=most_bytes)
        self._taken: dict[str, Embedded] = {}
        self.left_out = 0
        self.missing: dict[str, str] = {}  # the file and the reason, by hash
        self.begin_part()

    def begin_part(self) -> None:
        """Give the next part of the page its own room for pictures that came back between turns. So they take no room
        from those of prompts and of later parts."""
        self._part = _PictureLimit(images=MOST_IMAGES, size=PART_IMAGE_BYTES)

    def has(self, sha256: str) -> bool:
        """Return whether the run has kept a picture."""
        return os.path.lexists(picture_file(self._folder, sha256))

    def take(self, sha256: str, came_back: bool = False) -> Embedded | None:
        """Return a picture for the page; None if the file is missing or the page is full."""
        if (taken := self._taken.get(sha256)) is not None:
            return Embedded(href=f"#{taken.id}", is_small=taken.is_small)
        room = self._part if came_back else self._room
        if room.images < 1:
            self.left_out += 1
            return None
        if (found := self._read(sha256)) is None:
            return None
        if len(found.href) > room.size:
            self.left_out += 1
            return None
        room.images -= 1
        room.size -= len(found.href)
        self._taken[sha256] = found
        return found

    def _read(self, sha256: str) -> Embedded | None:
        """Return a picture as the page shows it; if it cannot be read, note why."""
        try:
            with opened(file := picture_file(self._folder, sha256)) as image:
                return self._shown(image, sha256)
        except UNREADABLE as error:
            self.missing[sha256] = f"{file.name}: {in_words(error)}"
            return None

    def _shown(self, image: Image.Image, sha256: str) -> Embedded:
        return embedded(image.convert("RGB"), id=f"image-{sha256}")


def opened(file: Path) -> Image.Image:
    """Open a picture of a run, to be read or closed. Raises one of UNREADABLE, now or when it is read."""
    stream = open_regular(file, LARGEST_FILE)
    try:
        image = Image.open(stream, formats=("WEBP", "PNG"))
        if image.width * image.height > MOST_PIXELS:
            raise ValueError(
                f"{image.width} x {image.height} pixels are more than {MOST_PIXELS:,}, the most that a page shows"
            )
    except UNREADABLE:
        stream.close()
        raise
    return image


def in_words(error: Exception) -> str:
    """Say why a picture cannot be read."""
    if isinstance(error, FileNotFoundError):
        return "is not kept (rollout.record_images)"
    if isinstance(error, UnidentifiedImageError):
        return "is not a WebP or PNG file"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def embedded(image: Image.Image, id: str | None = None) -> Embedded:
    """Embed an RGB picture as a data: URI."""
    is_small = has_visible_pixels(image.size)
    href = f"data:image/webp;base64,{base64.b64encode(webp(image)).decode('ascii')}"
    return Embedded(href=href, is_small=is_small, id=id)
