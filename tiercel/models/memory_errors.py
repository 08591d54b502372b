"""Whether an error means that memory ran out, and what to say where weights were loaded."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError

from tiercel.errors import ModelError

# What PyTorch's allocator, the system's mmap, and a shape beyond any address say.
MARKS = ("DefaultCPUAllocator", "Cannot allocate memory", "Storage size calculation overflowed")
HEADER_SIZE_BYTES = 8  # of a safetensors file, before its header
MOST_HEADER_BYTES = 100_000_000


def is_out_of_memory(error: BaseException) -> bool:
    """PyTorch has a class of its own for devices only; on a CPU it names its allocator."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(mark in str(error) for mark in MARKS)


def first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


@contextmanager
def memory_to_load(place: Path, remedy: str) -> Iterator[None]:
    """Inside, weights of a safetensors file, or of those in a directory, are loaded. Raises ModelError that names the
    file and the largest tensor where memory runs out."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError, SafetensorError) as error:
        if not is_out_of_memory(error):
            raise
        raise ModelError(
            f"{place}: memory ran out while it was loaded: {first_line(error)}\n{_sizes(place)}{remedy}"
        ) from error


def weight_files(place: Path) -> list[Path]:
    """The safetensors files of a directory, or the file itself."""
    return sorted(place.glob("*.safetensors")) if place.is_dir() else [place]


def weight_bytes(place: Path) -> int:
    """Bytes of a checkpoint's safetensors files."""
    return sum(file.stat().st_size for file in weight_files(place))


def _sizes(place: Path) -> str:
    """How large the files are, and what in them is the largest; nothing where they cannot be read."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        tensors = [(size, name, file.name) for file in weight_files(place) for name, size in _tensor_bytes(file)]
        size, name, file_name = max(tensors)
        whole = sum(each for each, _, _ in tensors)
        return (
            f"its files hold {whole / 1e9:.1f} GB; the largest tensor, {name} of {file_name}, has {size / 1e9:.1f} GB; "
        )
    return ""


def _tensor_bytes(file: Path) -> list[tuple[str, int]]:
    """Names and sizes, from the header alone."""
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(HEADER_SIZE_BYTES), "little")
        header = json.loads(stream.read(min(header_bytes, MOST_HEADER_BYTES)))
    places = {name: each["data_offsets"] for name, each in header.items() if name != "__metadata__"}
    return [(name, end - begin) for name, (begin, end) in places.items()]
