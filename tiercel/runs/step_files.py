"""Files of steps in rollouts/, evaluations/ and tokens/: lines of JSON, compressed some steps later.

The newest are plain text. Which are compressed depends on the step alone, so a run that was killed and resumed ends
with the same files. Imports no torch.
"""

import errno
import gzip
import io
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import zstandard

from tiercel.regular_files import LARGEST_FILE, OddFile, bounded_lines, is_linked, open_regular
from tiercel.runs.files import replacing
from tiercel.writing import GO_ON, writing

FOLDERS = ("rollouts", "evaluations", "tokens")
PLAIN_STEPS = 100  # the newest steps, whose files are left as they were written
SUFFIX = ".zst"
SUFFIXES = (SUFFIX, ".gz")  # older versions wrote gzip
_LEVEL = 19  # files are a sixth smaller than at the fastest level, and are read as fast
_NAME = re.compile(rf"step-([0-9]{{6,12}})\.jsonl(?:{'|'.join(map(re.escape, SUFFIXES))})?")


def step_of(name: str) -> int | None:
    """Return the step of a file by its name, or None if it is not a step's file."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def steps_of(folder: Path) -> tuple[int, ...]:
    """Return the steps that a folder has a file of, in order."""
    names = os.listdir(folder) if folder.is_dir() and not is_linked(str(folder)) else []
    return tuple(sorted({step for name in names if (step := step_of(name)) is not None}))


def stored(file: Path) -> Path:
    """Return where the lines of `file` are: in it, or in its compressed form if there is only that."""
    forms = [file, *(file.with_name(file.name + suffix) for suffix in SUFFIXES)]
    return next((form for form in forms if os.path.lexists(form)), file)


def open_step(file: Path, largest: int | None = None) -> IO[bytes]:
    """Open a step's file, compressed or not. Raises OSError like `open_regular`, and if it is damaged or expands to
    more than LARGEST_FILE bytes."""
    place = stored(file)
    stream = open_regular(place, largest)
    if place == file:
        return stream
    with stream:
        try:
            data = (_from_zstd if place.suffix == SUFFIX else _from_gzip)(stream)
        except (EOFError, zlib.error, zstandard.ZstdError) as error:
            kind = "zstd" if place.suffix == SUFFIX else "gzip"
            raise OddFile(errno.EINVAL, f"is no whole {kind} file ({error})", str(place)) from error
    if data is None:
        raise OddFile(errno.EFBIG, f"expands to more than the {LARGEST_FILE:,} bytes that are read", str(place))
    return io.BytesIO(data)


def _from_zstd(stream: IO[bytes]) -> bytes | None:
    """Decompress one frame, which says how long its content is; None if that is too long."""
    packed = stream.read(LARGEST_FILE)
    size = zstandard.frame_content_size(packed)
    return None if size > LARGEST_FILE else zstandard.ZstdDecompressor().decompress(packed, LARGEST_FILE)


def _from_gzip(stream: IO[bytes]) -> bytes | None:
    with gzip.GzipFile(fileobj=stream) as packed:
        data = packed.read(LARGEST_FILE + 1)
    return data if len(data) <= LARGEST_FILE else None


def read_step(file: Path) -> str:
    """Read a step's file as UTF-8, with replacement characters for anything else, or return an empty text if there is
    none. Raises OSError like `open_step`, and if the file is larger than LARGEST_FILE."""
    if not os.path.lexists(stored(file)):
        return ""
    with open_step(file, LARGEST_FILE) as stream:
        return stream.read(LARGEST_FILE).decode("utf-8", errors="replace")


def lines_of_step(file: Path) -> Iterator[bytes]:
    """Yield the lines of a step's file. Raises OSError like `open_step`, and if a line is longer than LONGEST_LINE."""
    with open_step(file) as stream:
        yield from bounded_lines(stream, file)


def pack_step(run: Path, step: int) -> None:
    """Compress the files of a step that are still plain. Raises RunError."""
    for file in (run / folder / f"step-{step:06d}.jsonl" for folder in FOLDERS):
        if not file.is_file() or file.is_symlink():
            continue
        packed = file.with_name(file.name + SUFFIX)
        with writing(packed, GO_ON):
            with open_regular(file) as plain, replacing(packed) as new:
                compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
                compressor.copy_stream(plain, new, size=file.stat().st_size)
            file.unlink()
