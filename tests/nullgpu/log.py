"""The log of a null GPU: launches, waits, copies, allocations, graphs and modules. Only its types exist elsewhere."""

import ctypes
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(os.environ["NULLGPU_SO"])
    library.nullgpu_peak.restype = ctypes.c_size_t
    return library


@dataclass(frozen=True, slots=True)
class Entry:
    """One call. The numbers depend on the kind: blocks, threads, bytes of shared memory, captured or not for a
    `launch`; registers, bytes of stack, bytes of shared memory for a kernel of a `module`; bytes for a `copy`."""

    kind: str
    numbers: tuple[int, int, int, int]
    name: str

    @property
    def broke_capture(self) -> bool:
        return self.kind == "sync" and self.numbers[0] == -1


@dataclass(slots=True)
class Log:
    """The calls between two points of a program."""

    entries: list[Entry] = field(default_factory=list)

    def of(self, kind: str) -> list[Entry]:
        """Return the calls of a kind: launch, gemm, copy, sync, malloc, free, graph, mark, set, host, nccl, module."""
        return [entry for entry in self.entries if entry.kind == kind]

    def counted(self, kind: str) -> dict[str, int]:
        """Count the calls of a kind by name."""
        return dict(sorted(Counter(entry.name for entry in self.of(kind)).items()))

    @property
    def refused(self) -> list[str]:
        return [entry.name for entry in self.of("launch") if "REFUSED" in entry.name]


@contextmanager
def logged() -> Iterator[Log]:
    """Log what is called inside; the entries are there at the end."""
    log = Log()
    _library().nullgpu_log(1)
    try:
        yield log
    finally:
        _library().nullgpu_log(0)
        with tempfile.NamedTemporaryFile("r") as file:
            _library().nullgpu_dump(file.name.encode())
            for line in file:
                _, kind, *numbers, name = line.rstrip("\n").split("\t", 6)
                first, second, third, fourth = map(int, numbers)
                log.entries.append(Entry(kind, (first, second, third, fourth), name))


def mark(label: str) -> None:
    """Put a mark into the log."""
    _library().nullgpu_mark(label.encode())


def peak_bytes() -> int:
    """Return the most memory that was taken of the first card."""
    return int(_library().nullgpu_peak())
