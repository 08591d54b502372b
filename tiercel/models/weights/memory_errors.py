"""Recognition of out-of-memory errors, and their description if they occur while weights are loaded."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError

from tiercel.errors import ModelError
from tiercel.message_text import first_line

# Texts of PyTorch's allocator, of the system's mmap, and of a tensor too large for any address.
MARKS = ("DefaultCPUAllocator", "Cannot allocate memory", "Storage size calculation overflowed")
HEADER_SIZE_BYTES = 8  # at the start of a safetensors file: the size of its header
MOST_HEADER_BYTES = 100_000_000


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out. PyTorch has an exception for this only on devices; on a CPU its message names the
    allocator."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(mark in str(error) for mark in MARKS)


@contextmanager
def memory_to_load(place: Path, remedy: str) -> Iterator[None]:
    """Wrap code that loads a safetensors file, or those of a directory. If memory runs out, raises ModelError, which
    names the file, the largest tensor and the remedy."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError, SafetensorError) as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"{place}: memory ran out while it was loaded: {first_line(error)}\n{_sizes(place)}{remedy}"
        ) from error


def weight_files(place: Path) -> list[Path]:
    """Return the safetensors files of a directory, or the file itself."""
    return sorted(place.glob("*.safetensors")) if place.is_dir() else [place]


def weight_bytes(place: Path) -> int:
    """Add up the bytes of a checkpoint's safetensors files."""
    return sum(file.stat().st_size for file in weight_files(place))


def _sizes(place: Path) -> str:
    """Describe how large the files and their largest tensor are; empty if they cannot be read."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        tensors = [(size, name, file.name) for file in weight_files(place) for name, size in tensor_bytes(file)]
        size, name, file_name = max(tensors)
        whole = sum(each for each, _, _ in tensors)
        return (
            f"its files have {whole / 1e9:.1f} GB; the largest tensor, {name} of {file_name}, has {size / 1e9:.1f} GB; "
        )
    return ""


def tensor_bytes(file: Path) -> list[tuple[str, int]]:
    """Read the names of tensors and their sizes in bytes from the header."""
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(HEADER_SIZE_BYTES), "little")
        header = json.loads(stream.read(min(header_bytes, MOST_HEADER_BYTES)))
    places = {name: each["data_offsets"] for name, each in header.items() if name != "__metadata__"}
    return [(name, end - begin) for name, (begin, end) in places.items()]
