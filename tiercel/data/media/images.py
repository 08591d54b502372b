"""Open images of rows, which are not trusted: check the path, read the size from the header, decode to plain RGB.

Only PNG, JPEG and WEBP are read, from files under the recipe's roots or from bytes in the row. Nothing is downloaded.
models/families/image_transforms.py resizes them to what a model takes.
"""

import os
import re
import stat
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from io import BufferedReader, BytesIO
from pathlib import Path

from PIL import Image, ImageFile, PngImagePlugin, UnidentifiedImageError

from tiercel.data.texts import told
from tiercel.errors import DataError, EnvironmentProblem
from tiercel.image_decoding import SIDEWAYS, orientation, upright_rgb
from tiercel.message_text import CUT, LONGEST_PATH
from tiercel.types import ImageRoots, ImageSource, Size

ACCEPTED_FORMATS = ("PNG", "JPEG", "WEBP")

# data.max_image_pixels is the limit, which `_opened` compares with the header before any pixel is decoded. Pillow's own
# limit would refuse pictures that the recipe allows, from 179 million pixels on.
Image.MAX_IMAGE_PIXELS = None
# Text in a PNG beside its pixels, such as the workflow that made it, is harmless; Pillow's own limit for it is 1 MB.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = 64 * 1024 * 1024

# What Pillow raises for broken files: SyntaxError for broken chunks, LookupError for broken EXIF blocks.
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
)

_OTHER_KINDS = {b"GIF8": "GIF", b"BM": "BMP", b"II*\0": "TIFF", b"MM\0*": "TIFF", b"\0\0\0\x0cjP  ": "JPEG2000"}
_OF_BRANDS = {b"avif": "AVIF", b"heic": "HEIC", b"heix": "HEIC", b"mif1": "HEIC"}

LONGEST_NAME = 255  # bytes; the system's limit for one name in a path
_LONGEST_SHOWN = 200  # characters shown in a message, of a text that is too long to be a path
_MOST_READS = 300_000  # for an image of up to 600 MB; a PNG of 400 MB takes 200,000
_BYTES_OF_A_READ = 2000  # the least on average, for a larger image
# Control characters, and halves of surrogate pairs, which cannot be written to a file.
_UNWRITABLE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class ImageProblem(DataError):
    """An image cannot be used. `path` is as the row names it; `reason` says why."""

    def __init__(self, path: str, reason: str, field: str = "images"):
        self.path = path
        self.reason = reason
        super().__init__(f"{shown_path(path)}: {reason}", field=field)

    def __reduce__(self) -> tuple[type["ImageProblem"], tuple[str, str, str]]:
        return ImageProblem, (self.path, self.reason, self.field)


def open_header(source: ImageSource, roots: ImageRoots, max_pixels: int) -> Size:
    """Read (width, height) in pixels of the upright picture from the header.

    Raises ImageProblem if the path leads out of `roots`, or if the file is missing, empty, of another format, animated,
    or has more than `max_pixels` by its header.
    """
    with _opened(source, roots, max_pixels) as image:
        width, height = image.size
        return (height, width) if orientation(image) in SIDEWAYS else (width, height)


def decode(source: ImageSource, roots: ImageRoots, max_pixels: int) -> Image.Image:
    """Decode an image to an upright picture in 8-bit RGB, without metadata.

    Transparent pixels are drawn on white. 16-bit greyscale keeps its high byte. CMYK is converted without a colour
    profile. Raises ImageProblem as `open_header` does, and if the pixel data are incomplete or broken.
    """
    if ImageFile.LOAD_TRUNCATED_IMAGES:
        raise EnvironmentProblem(told("incomplete images"))
    with _opened(source, roots, max_pixels) as image:
        return upright_rgb(image)


def source_name(source: ImageSource) -> str:
    """Return the name of an image for messages and reports."""
    return source.path if source.path is not None else "(embedded image)"


def path_problem(path: str) -> str | None:
    """Return why a row's image path is refused, judging by its text alone; None if it may be opened."""
    if not path:
        return "the path is empty"
    longest = _longest_name(path)
    if "\0" in path:
        return "the path contains a null character"
    if _UNWRITABLE.search(path):
        return "the path contains a control character or half of a surrogate pair"
    if len(path) > LONGEST_PATH:
        return f"the path has {len(path)} characters, but at most {LONGEST_PATH} are allowed"
    if longest > LONGEST_NAME:
        return f"a name in the path has {longest} bytes, but at most {LONGEST_NAME} are allowed"
    if is_web_address(path):
        return told("web address")
    if "://" in path or path.lower().startswith(("data:", "file:")):
        return "is a URL; give a path relative to data.image_root"
    parts = path.replace("\\", "/").split("/")
    if path[0] == "\\" or (len(parts[0]) == 2 and parts[0][1] == ":"):
        return "is an absolute Windows path; make it relative to data.image_root"
    if ".." in parts:
        return "contains '..'; make it relative to data.image_root"
    return None


def is_web_address(path: str) -> bool:
    """Return whether a row's image path is an address that `tiercel data fetch` may download."""
    return path.lower().startswith(("https://", "http://"))


def _longest_name(path: str) -> int:
    return max(len(name.encode(errors="surrogatepass")) for name in path.split("/"))


def require_path(path: str, field: str = "images") -> None:
    """Raise ImageProblem if `path_problem` refuses a path."""
    if problem := path_problem(path):
        raise ImageProblem(path, problem, field)


def stray_problem(path: str, roots: ImageRoots) -> str | None:
    """Return why an absolute path is refused; None for any other path, and None if its directory is under a root, in
    which case the file is checked when it is opened."""
    if not path.startswith("/") or _directory_is_under(os.path.dirname(path), roots):
        return None
    return None if _is_under(Path(os.path.realpath(path)), roots) else told("stray path", roots.base)


@lru_cache(maxsize=4096)  # rows of a file have few directories, and the disk may be slow
def _directory_is_under(directory: str, roots: ImageRoots) -> bool:
    return _is_under(Path(os.path.realpath(directory)), roots)


def _is_under(file: Path, roots: ImageRoots) -> bool:
    """Return whether a file is under a root, following links. The root of the file system does not count as a root."""
    real = (Path(os.path.realpath(root)) for root in (roots.base, *roots.more))
    return any(root != root.parent and file.is_relative_to(root) for root in real)


def shown_path(path: str) -> str:
    """Return a row's path as shown in a message, without control characters; only a text that is too long to be a path
    is shortened."""
    is_path = len(path) <= LONGEST_PATH and _longest_name(path) <= LONGEST_NAME
    text = path if is_path else path[:_LONGEST_SHOWN] + CUT
    return text if text.isprintable() else ascii(text)


def resolve(path: str, roots: ImageRoots) -> Path:
    """Return the file that `path` names under `roots`, following symbolic links. Raises ImageProblem if it is
    elsewhere, missing, empty, or not a regular file."""
    require_path(path)
    try:
        base = Path(roots.base).resolve()
        file = (base / path).resolve()
        if path.startswith("/"):
            if not _is_under(file, roots):
                raise ImageProblem(path, told("stray path", roots.base))
        elif base == base.parent:
            raise ImageProblem(path, told("path from the top"))
        elif not _is_under(file, roots):
            raise ImageProblem(path, told("link out of the root", roots.base))
        status = file.stat()
    except FileNotFoundError as error:
        where = "" if path.startswith("/") else f" under data.image_root ({roots.base})"
        if "\\" in path and (base / path.replace("\\", "/")).is_file():
            raise ImageProblem(path, "has backslashes, as on Windows; write it with /") from error
        reason = f"there is no such file{where}"
        if "\\" in path:
            reason = f"{reason}; it has backslashes, as on Windows, in place of /"
        raise ImageProblem(path, reason) from error
    except (OSError, RuntimeError) as error:  # RuntimeError is raised for a loop of links before Python 3.13
        raise ImageProblem(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ImageProblem(path, "is not a regular file")
    if status.st_size == 0:
        raise ImageProblem(path, "the file is empty (0 bytes)")
    return file


@contextmanager
def _opened(source: ImageSource, roots: ImageRoots, max_pixels: int) -> Iterator[Image.Image]:
    """Open an image and check its header. Errors in reading it, also those in the caller's code, become
    ImageProblem."""
    name = source_name(source)
    try:
        with _stream(source, roots) as stream, Image.open(stream, formats=ACCEPTED_FORMATS) as image:
            if problem := _header_problem(image, max_pixels):
                raise ImageProblem(name, problem)
            yield image
    except ImageProblem:
        raise
    except UnidentifiedImageError as error:
        if (kind := _other_kind(source, roots)) is not None:
            raise ImageProblem(name, f"is a {kind} image; convert it to PNG, JPEG or WEBP") from error
        raise ImageProblem(name, "is not a PNG, JPEG or WEBP image, or its header is broken") from error
    except _UNREADABLE as error:
        raise ImageProblem(name, f"cannot be read: {str(error) or type(error).__name__}") from error


def _other_kind(source: ImageSource, roots: ImageRoots) -> str | None:
    """Return what kind of picture a source is by its first bytes, whatever it is called, if it is a usual one that is
    not read here."""
    beginning = b""
    with suppress(*_UNREADABLE), _stream(source, roots) as stream:
        beginning = stream.read(12)
    known = (kind for start, kind in _OTHER_KINDS.items() if beginning.startswith(start))
    return next(known, _OF_BRANDS.get(beginning[8:]) if beginning[4:8] == b"ftyp" else None)


class _Stream(BufferedReader):
    """Reads the bytes of an image, with a limited number of reads: Pillow looks for a JPEG's next marker byte by byte,
    through padding of any length."""

    reads, most_reads = 0, _MOST_READS

    def read(self, size: int | None = -1) -> bytes:
        self.reads += 1
        if self.reads > self.most_reads:
            raise OSError("its header has too many padding bytes")
        return super().read(size)


def _stream(source: ImageSource, roots: ImageRoots) -> _Stream:
    if source.data is not None:
        if not source.data:
            raise ImageProblem(source_name(source), "the embedded image is empty (0 bytes)")
        return _Stream(BytesIO(source.data))
    if source.path is None:
        raise ImageProblem(source_name(source), "has neither a path nor bytes")
    file = resolve(source.path, roots)
    stream = _Stream(file.open("rb", buffering=0))
    stream.most_reads = max(_MOST_READS, file.stat().st_size // _BYTES_OF_A_READ)
    return stream


def _header_problem(image: Image.Image, max_pixels: int) -> str | None:
    width, height = image.size
    if width * height > max_pixels:
        return f"has {width} x {height} pixels, more than data.max_image_pixels = {max_pixels}"
    # The other pictures of a multi-picture JPEG ("MPO", which many phones write) are previews or depth maps of the
    # first one, not frames.
    frames = getattr(image, "n_frames", 1)
    if image.format != "MPO" and frames > 1:
        return f"is animated ({frames} frames); give a single picture"
    return None
