"""Checkpoints: written aside, hashed, renamed last; the newest valid one wins."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercel.runs.files import file_sha256, sync, write_atomically

MANIFEST = "MANIFEST.json"
STATE = "state.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCheckpoint:
    """A checkpoint whose every file has the hash that its manifest states."""

    step: int
    path: Path
    state: dict[str, Any]


def directory_of(root: Path, step: int) -> Path:
    return root / f"step-{step:06d}"


def save_checkpoint(root: Path, step: int, write: Callable[[Path], None], state: dict[str, Any]) -> Path:
    """`write` fills a temporary directory; then state, manifest, flush, rename."""
    final = directory_of(root, step)
    temporary = root / f".{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write(temporary)
    write_atomically(temporary / STATE, json.dumps({"step": step, **state}, indent=1, sort_keys=True))
    files = sorted(path for path in temporary.rglob("*") if path.is_file())
    hashes = {path.relative_to(temporary).as_posix(): file_sha256(path) for path in files}
    for path in files:
        sync(path)
    write_atomically(temporary / MANIFEST, json.dumps({"sha256": hashes}, indent=1, sort_keys=True))
    for directory in {path.parent for path in files}:
        sync(directory)
    if final.exists():  # an invalid one of the same step, or the same step saved again
        shutil.rmtree(final)
    temporary.rename(final)
    sync(root)
    return final


def problem_with(path: Path) -> str | None:
    """Why a checkpoint cannot be used, or None."""
    manifest = path / MANIFEST
    try:
        hashes = dict(json.loads(manifest.read_text(encoding="utf-8"))["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} is missing or unreadable"
    if STATE not in hashes:
        return f"{STATE} is not in the manifest"
    for name, expected in hashes.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file_sha256(file) != expected:
            return f"{name} does not have the sha256 of the manifest"
    present = {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()} - {MANIFEST}
    if extra := sorted(present - set(hashes)):
        return f"{extra[0]} is not in the manifest"
    return None


def list_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """Finished checkpoints by step, valid or not, newest first."""
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := re.fullmatch(r"step-(\d+)", path.name))]
    return sorted(found, reverse=True)


def newest_valid(root: Path, report: Callable[[str], None]) -> FoundCheckpoint | None:
    """The newest checkpoint that is whole; each bad one is reported and passed over."""
    for step, path in list_checkpoints(root):
        if (problem := problem_with(path)) is not None:
            report(f"checkpoint {path} is passed over: {problem}")
            continue
        return FoundCheckpoint(step=step, path=path, state=json.loads((path / STATE).read_text(encoding="utf-8")))
    return None


def prune(root: Path, newest: int, keep: int) -> None:
    """Keep the `keep` checkpoints up to step `newest`, the one just saved. Those past it were passed over when the run
    was resumed, and count for nothing; they go, and leftovers of interrupted saves too."""
    found = list_checkpoints(root)
    kept = [path for step, path in found if step <= newest][:keep]
    for _, path in found:
        if path not in kept:
            shutil.rmtree(path)
    for path in root.glob(".step-*.tmp"):
        shutil.rmtree(path)
