"""Open images of rows, which are not trusted: check the path, read the size from the header, decode to plain RGB.

Only PNG, JPEG and WEBP are read, from files under the recipe's roots or from bytes in the row. Nothing is downloaded.
"""

import os
import re
import stat
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from io import BufferedReader, BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError

from tiercel.errors import DataError, EnvironmentProblem
from tiercel.shortening import CUT, LONGEST_PATH
from tiercel.types import ImageRoots, ImageSource, Size

ACCEPTED_FORMATS = ("PNG", "JPEG", "WEBP")

# What Pillow raises for broken files: SyntaxError for broken chunks, LookupError for broken EXIF blocks, the warning
# where the user has turned warnings into errors.
_UNREADABLE = (
    OSError,
    EOFError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    OverflowError,
    RuntimeError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)

_ORIENTATION_TAG = 0x0112
# EXIF orientation -> the operation that turns the picture upright. Pictures with any other value are upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = frozenset({5, 6, 7, 8})
_WHITE = (255, 255, 255, 255)

_LONGEST_SHOWN = 200  # characters, in a message, of a text that is too long to be a path
_MOST_READS = 300_000  # of one image; a PNG of 400 MB takes 200,000
# Control characters, and halves of surrogate pairs, which cannot be written to a file.
_UNWRITABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class ImageProblem(DataError):
    """Raised where an image cannot be used. `path`: as the row names it; `reason`: why."""

    def __init__(self, path: str, reason: str, field: str = "images"):
        self.path = path
        self.reason = reason
        super().__init__(f"{shown_path(path)}: {reason}", field=field)

    def __reduce__(self) -> tuple[type["ImageProblem"], tuple[str, str, str]]:
        return ImageProblem, (self.path, self.reason, self.field)


def open_header(source: ImageSource, roots: ImageRoots, max_pixels: int) -> Size:
    """Read (width, height) in pixels of the upright picture from the header.

    Raises ImageProblem where the path leads out of `roots`, and where the file is missing, empty, of another format,
    animated, or has more than `max_pixels` by its header.
    """
    with _opened(source, roots, max_pixels) as image:
        width, height = image.size
        return (height, width) if _orientation(image) in _SIDEWAYS else (width, height)


def decode(source: ImageSource, roots: ImageRoots, max_pixels: int) -> Image.Image:
    """Decode an image to an upright picture in 8-bit RGB, without metadata.

    Transparent pixels are drawn on white. 16-bit greyscale keeps its high byte. CMYK is converted without a colour
    profile. Raises ImageProblem as `open_header` does, and where the pixel data are incomplete or broken.
    """
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise EnvironmentProblem(
            "some imported code set PIL.ImageFile.LOAD_TRUNCATED_IMAGES to True, so incomplete images would be taken "
            "for complete ones; set it back to False"
        )
    with _opened(source, roots, max_pixels) as image:
        # Read before load(), as `open_header` does, because load() also reads metadata after the pixels.
        transposition = _UPRIGHT.get(_orientation(image))
        image.load()
        picture = _to_rgb(image)
        return picture if transposition is None else picture.transpose(transposition)


def source_name(source: ImageSource) -> str:
    """Name an image for messages and reports."""
    return source.path if source.path is not None else "(embedded image)"


def path_problem(path: str) -> str | None:
    """Say why a row's image path is refused, from its text; None where it may be opened."""
    if not path:
        return "the path is empty"
    if "\0" in path:
        return "the path contains a null character"
    if _UNWRITABLE.search(path):
        return "the path contains a control character or half of a surrogate pair"
    if len(path) > LONGEST_PATH:
        return f"the path has {len(path)} characters; at most {LONGEST_PATH} are allowed"
    if "://" in path or path.lower().startswith(("data:", "file:")):
        return "is a URL, and tiercel downloads no images; give a path relative to data.image_root"
    parts = path.replace("\\", "/").split("/")
    if path[0] == "\\" or (len(parts[0]) == 2 and parts[0][1] == ":"):
        return "is an absolute path of Windows; give it relative to data.image_root"
    if ".." in parts:
        return "contains '..'; give it relative to data.image_root"
    return None


def require_path(path: str, field: str = "images") -> None:
    """Raise ImageProblem where `path_problem` refuses a path."""
    if problem := path_problem(path):
        raise ImageProblem(path, problem, field)


def stray_problem(path: str, roots: ImageRoots) -> str | None:
    """Say why an absolute path is refused. None for any other path, and where its directory is under a root: then the
    file is checked when it is opened."""
    if not path.startswith("/") or _directory_is_under(os.path.dirname(path), roots):
        return None
    return None if _is_under(Path(os.path.realpath(path)), roots) else _stray(roots)


@lru_cache(maxsize=4096)  # rows of a file have few directories, and the disk may be slow
def _directory_is_under(directory: str, roots: ImageRoots) -> bool:
    return _is_under(Path(os.path.realpath(directory)), roots)


def _is_under(file: Path, roots: ImageRoots) -> bool:
    """Whether a file is under a root, with links followed. The root of the file system does not count."""
    real = (Path(os.path.realpath(root)) for root in (roots.base, *roots.more))
    return any(root != root.parent and file.is_relative_to(root) for root in real)


def _stray(roots: ImageRoots) -> str:
    return (
        f"is an absolute path that is neither under data.image_root ({roots.base}) nor under data.image_roots; add "
        "its directory to data.image_roots, or give it relative to data.image_root"
    )


def shown_path(path: str) -> str:
    """Write a row's path for a message, without control characters; only what is no path is cut."""
    text = path if len(path) <= LONGEST_PATH else path[:_LONGEST_SHOWN] + CUT
    return text if text.isprintable() else ascii(text)


def resolve(path: str, roots: ImageRoots) -> Path:
    """Return the file that `path` names under `roots`, with symbolic links followed. Raises ImageProblem where it is
    elsewhere, missing, empty, or not a regular file."""
    require_path(path)
    try:
        base = Path(roots.base).resolve()
        file = (base / path).resolve()
        if path.startswith("/"):
            if not _is_under(file, roots):
                raise ImageProblem(path, _stray(roots))
        elif base == base.parent:
            reason = "could be anywhere in the file system; set data.image_root to the directory of the images"
            raise ImageProblem(path, reason)
        elif not file.is_relative_to(base):
            raise ImageProblem(path, f"leads out of data.image_root ({roots.base}) through a symbolic link")
        status = file.stat()
    except FileNotFoundError as error:
        where = "" if path.startswith("/") else f" under data.image_root ({roots.base})"
        raise ImageProblem(path, f"no such file{where}") from error
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise ImageProblem(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ImageProblem(path, "is not a regular file")
    if status.st_size == 0:
        raise ImageProblem(path, "the file is empty (0 bytes)")
    return file


@contextmanager
def _opened(source: ImageSource, roots: ImageRoots, max_pixels: int) -> Iterator[Image.Image]:
    """Open an image and check its header. Errors of reading it, in the caller's code too, become ImageProblem."""
    name = source_name(source)
    try:
        with _stream(source, roots) as stream, Image.open(stream, formats=ACCEPTED_FORMATS) as image:
            if problem := _header_problem(image, max_pixels):
                raise ImageProblem(name, problem)
            yield image
    except ImageProblem:
        raise
    except UnidentifiedImageError as error:
        raise ImageProblem(name, "is not a PNG, JPEG or WEBP image, or its header is broken") from error
    except _UNREADABLE as error:
        raise ImageProblem(name, f"cannot be read: {str(error) or type(error).__name__}") from error


class _Stream(BufferedReader):
    """Reads bytes of an image, with a limited number of reads: Pillow looks for a JPEG's next marker byte by byte,
    through padding of any length."""

    reads = 0

    def read(self, size: int | None = -1) -> bytes:
        self.reads += 1
        if self.reads > _MOST_READS:
            raise OSError("its header has too many padding bytes")
        return super().read(size)


def _stream(source: ImageSource, roots: ImageRoots) -> _Stream:
    if source.data is not None:
        if not source.data:
            raise ImageProblem(source_name(source), "the embedded image is empty (0 bytes)")
        return _Stream(BytesIO(source.data))
    if source.path is None:
        raise ImageProblem(source_name(source), "has neither a path nor bytes")
    return _Stream(resolve(source.path, roots).open("rb", buffering=0))


def _header_problem(image: Image.Image, max_pixels: int) -> str | None:
    width, height = image.size
    if width * height > max_pixels:
        return f"{width} x {height} pixels are more than data.max_image_pixels = {max_pixels}"
    # The other pictures of a multi-picture JPEG ("MPO", which many phones write) are previews or depth maps of the
    # first one, not frames.
    frames = getattr(image, "n_frames", 1)
    if image.format != "MPO" and frames > 1:
        return f"is animated ({frames} frames); give a single picture"
    return None


def _orientation(image: Image.Image) -> int:
    """Read the EXIF orientation without loading the pixels."""
    if image.format == "PNG":  # its getexif() would decode the picture first
        exif = Image.Exif()
        exif.load(image.info.get("exif", b""))
    else:
        exif = image.getexif()
    return exif.get(_ORIENTATION_TAG, 1)


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "I" or image.mode.startswith("I;16"):
        picture = _from_16_bit(image)
    elif image.has_transparency_data:
        canvas = Image.new("RGBA", image.size, _WHITE)
        picture = Image.alpha_composite(canvas, image.convert("RGBA")).convert("RGB")
    else:
        picture = image.convert("RGB")
    picture.info = {}  # otherwise profiles and EXIF would be written wherever the picture is saved
    return picture


def _from_16_bit(image: Image.Image) -> Image.Image:
    """Convert 16-bit greyscale by its high byte (Pillow would clip at 255); the transparent value becomes white."""
    samples = np.asarray(image)
    grey = (samples >> 8).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[samples == transparent] = 255
    return Image.fromarray(grey).convert("RGB")
