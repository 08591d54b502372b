"""Save and load tensors in shards: each rank writes the rows that it has of each tensor, and reads the rows that it
needs.

The files are those of torch's distributed checkpoint in its safetensors form, which `HuggingFaceStorageReader` reads:
`DCP_SHARDING_INFO` in a file's header has the place of each piece. They are written and read here, because torch's
writer holds a rank's share twice more in memory, and the watchdog does not know its collectives. No file is a pickle.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tiercel.errors import ModelError
from tiercel.models.weights.memory_errors import is_out_of_memory, memory_to_load

PLACES, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"  # torch's names
MOMENTS_FILE, MOMENTS = "optimizer.safetensors", "optimizer"  # in a checkpoint: the whole file, or the folder of shards
REMEDY = "free some memory, or put the right file there"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPiece:
    """Consecutive rows of a tensor, or all of it."""

    tensor: Tensor
    start: int = 0  # the position of its first row in the whole tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPiece:
    """A piece in a file."""

    file: Path
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        """Return the number of the row after its last one."""
        return self.start + self.shape[0] if self.shape else 1


def write_pieces(directory: Path, rank: int, pieces: Mapping[str, ShardPiece], most_bytes: int) -> list[Path]:
    """Write a rank's pieces into files of at most that many bytes, and return the files; a file with only one tensor
    may have more. Only the tensors of one file are copied to the CPU at once."""
    bunches: list[list[str]] = []
    held = 0
    for name, piece in pieces.items():
        if not bunches or held + piece.tensor.nbytes > most_bytes:
            bunches.append([])
            held = 0
        bunches[-1].append(name)
        held += piece.tensor.nbytes
    files = [directory / f"rank-{rank:05d}-{number:05d}.safetensors" for number in range(len(bunches))]
    for file, names in zip(files, bunches, strict=True):
        _write(file, {name: pieces[name] for name in names})
    return files


def _write(file: Path, pieces: Mapping[str, ShardPiece]) -> None:
    tensors = {name: piece.tensor.detach().cpu().contiguous() for name, piece in pieces.items()}
    offsets = {name: {OFFSETS: [pieces[name].start, *[0] * each.ndim][: each.ndim]} for name, each in tensors.items()}
    save_file(tensors, file, metadata={PLACES: json.dumps(offsets)})  # a second key would come in a random order


class SavedTensors(Mapping[str, Tensor]):
    """Reads tensors from files, each when it is accessed. A file without places contains whole tensors."""

    def __init__(self, files: Sequence[Path]):
        self._opened: dict[Path, Any] = {}
        self._pieces: dict[str, list[StoredPiece]] = {}
        for file in files:
            for name, piece in self._listed(file):
                self._pieces.setdefault(name, []).append(piece)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, name: str) -> Tensor:
        """Read a whole tensor. Raises ModelError if rows are missing or a file cannot be read."""
        return self.rows(name, 0, max(piece.stop for piece in self._pieces[name]))

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read rows of a tensor, from the files that have them. Raises ModelError as above."""
        found: list[Tensor] = []
        place = start
        for piece in sorted(self._pieces[name], key=lambda piece: piece.start):
            if piece.start <= place < piece.stop:
                found.append(self._read(name, piece, place, min(stop, piece.stop)))
                place = min(stop, piece.stop)
            if place >= stop and found:
                return found[0] if len(found) == 1 else torch.cat(found)
        first = self._pieces[name][0]
        if start >= stop:
            return self._read(name, first, first.start, first.start)
        raise ModelError(f"{first.file.parent}: no file there has row {place} of {name}; restore the missing file")

    def _read(self, name: str, piece: StoredPiece, start: int, stop: int) -> Tensor:
        with memory_to_load(piece.file, REMEDY), _readable(piece.file):
            opened = self._opened[piece.file]
            if not piece.shape:
                return opened.get_tensor(name)
            return opened.get_slice(name)[start - piece.start : stop - piece.start]

    def _listed(self, file: Path) -> Iterator[tuple[str, StoredPiece]]:
        """Yield the pieces in a file, by the tensor's name."""
        with memory_to_load(file, REMEDY), _readable(file):
            self._opened[file] = opened = safe_open(file, "pt")
            places = json.loads((opened.metadata() or {}).get(PLACES, "{}"))
            for name in opened.keys():  # noqa: SIM118
                offsets = places[name][OFFSETS] if places else [0]
                shape = tuple(opened.get_slice(name).get_shape())
                yield name, StoredPiece(file=file, start=int(offsets[0]) if shape else 0, shape=shape)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Raise ModelError, which names the file, if the code in this context cannot read it."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"{file} cannot be read as a safetensors file: {error}") from error


def saved_moments(checkpoint: Path) -> SavedTensors:
    """Find the optimiser's state in a checkpoint: in one file, or in shards. Raises ModelError if it cannot be read."""
    whole = checkpoint / MOMENTS_FILE
    return SavedTensors([whole] if whole.is_file() else sorted((checkpoint / MOMENTS).glob("*.safetensors")) or [whole])
