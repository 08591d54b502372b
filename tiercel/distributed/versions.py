"""What a run computes with: versions of packages, and hashes of files."""

import hashlib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SAMPLED_BYTES = 2**20  # bytes read at each end of a file that is too large to be read whole

PACKAGES = (
    "tiercel",
    "torch",
    "transformers",
    "tokenizers",
    "peft",
    "safetensors",
    "pillow",
    "numpy",
    "pydantic",
    "vllm",
    "deepspeed",
)


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages that are installed, by name."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def fingerprint(
    files: Sequence[Path], *, pieces: int = 2, piece: int = SAMPLED_BYTES, whole: int = 2 * SAMPLED_BYTES
) -> str:
    """Hash the files' names, sizes and contents. A file of more than `whole` bytes is read in `pieces` of `piece`
    bytes, from its beginning to its end, because reading whole checkpoints would take minutes. The beginning of a
    safetensors file has its names and shapes."""
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= whole:
                digest.update(file.read())
                continue
            for number in range(pieces):
                file.seek((size - piece) * number // (pieces - 1))
                digest.update(file.read(piece))
    return digest.hexdigest()[:16]
