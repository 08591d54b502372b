"""Checkpoints: written to a temporary directory, hashed, and renamed last. A run resumes from the newest valid one."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tiercel.errors import RunError
from tiercel.runs.files import file_sha256, sync, write_atomically

MANIFEST = "MANIFEST.json"
STATE = "state.json"
SCORE = "score"  # in the state of a checkpoint that was evaluated: the metric's name and its value


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCheckpoint:
    """A checkpoint in which each file has the hash that the manifest states."""

    step: int
    path: Path
    state: dict[str, Any]


def directory_of(root: Path, step: int) -> Path:
    """Return the directory of a step's checkpoint."""
    return root / f"step-{step:06d}"


def save_checkpoint(
    root: Path, step: int, write: Callable[[Path], None], state: dict[str, Any], *, expected_bytes: int = 0
) -> Path:
    """Save a checkpoint and return its directory. `write` fills a temporary directory; then the state and the manifest
    are added, everything is flushed to disk, and the directory is renamed. A valid checkpoint of the same step stays as
    it is. Raises RunError, before anything is written, where the disk has less than `expected_bytes` free."""
    temporary = begin_checkpoint(root, step, expected_bytes=expected_bytes)
    if temporary is None:
        return directory_of(root, step)
    write(temporary)
    return complete_checkpoint(temporary, step, state)


def begin_checkpoint(root: Path, step: int, *, expected_bytes: int = 0) -> Path | None:
    """Make the temporary directory of a checkpoint and return it, for `complete_checkpoint`; None where a valid
    checkpoint of the step is there already. Raises RunError where the disk has less than `expected_bytes` free."""
    final = directory_of(root, step)
    if final.exists() and problem_with(final) is None:  # replacing it would leave no checkpoint for a moment
        return None
    temporary = root / f".{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    root.mkdir(parents=True, exist_ok=True)
    require_space(root, expected_bytes)
    temporary.mkdir()
    return temporary


def complete_checkpoint(
    temporary: Path, step: int, state: dict[str, Any], known: Mapping[str, str] = MappingProxyType({})
) -> Path:
    """Add the state and the manifest, flush everything to disk, rename the directory and return its new path. `known`:
    the sha256 of files that the ranks have flushed and hashed, by name."""
    write_atomically(temporary / STATE, json.dumps({"step": step, **state}, indent=1, sort_keys=True))
    files = {path.relative_to(temporary).as_posix(): path for path in sorted(temporary.rglob("*")) if path.is_file()}
    assert known.keys() <= files.keys()
    hashes = {name: known[name] if name in known else file_sha256(path) for name, path in files.items()}
    for name, path in files.items():
        if name not in known:
            sync(path)
    write_atomically(temporary / MANIFEST, json.dumps({"sha256": hashes}, indent=1, sort_keys=True))
    for directory in (temporary, *(path for path in temporary.rglob("*") if path.is_dir())):
        sync(directory)
    root, final = temporary.parent, directory_of(temporary.parent, step)
    if final.exists():  # a damaged one
        shutil.rmtree(final)
    temporary.rename(final)
    sync(root)
    return final


def require_space(directory: Path, needed: int) -> None:
    """Require free space on the disk of `directory`. Raises RunError where it has less than `needed` bytes free."""
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise RunError(
            f"{directory}: the checkpoint needs {needed:,} bytes, and the disk has {free:,} free; make room there or "
            "lower train.keep; the same command goes on from the newest checkpoint"
        )


def problem_with(path: Path) -> str | None:
    """Return why a checkpoint cannot be used; None where it can."""
    hashes = _stated_hashes(path / MANIFEST)
    if hashes is None:
        return f"{MANIFEST} is missing or unreadable"
    if STATE not in hashes:
        return f"{STATE} is not in the manifest"
    for name, expected in hashes.items():
        if (problem := _file_problem(path / name, expected)) is not None:
            return f"{name} {problem}"
    present = {p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file()} - {MANIFEST}
    if extra := sorted(present - set(hashes)):
        return f"{extra[0]} is not in the manifest"
    return _state_problem(path)


def _stated_hashes(manifest: Path) -> dict[str, Any] | None:
    try:
        hashes = json.loads(manifest.read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return hashes if isinstance(hashes, dict) else None


def _file_problem(file: Path, expected: Any) -> str | None:
    try:
        if not file.is_file():
            return "is missing"
        return None if file_sha256(file) == expected else "does not have the sha256 of the manifest"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


def _state_problem(path: Path) -> str | None:
    """Refuse a checkpoint under the name of another: the data would go on from the wrong row."""
    try:
        state = _read_state(path)
    except (OSError, ValueError, RecursionError):
        return f"{STATE} is not JSON"
    if not isinstance(state, dict) or state.get("step") != int(path.name.removeprefix("step-")):
        return f"{STATE} is not of this step"
    return None


def _read_state(path: Path) -> Any:
    return json.loads((path / STATE).read_text(encoding="utf-8"))


def list_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """List finished checkpoints with their steps, valid or not, newest first."""
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := re.fullmatch(r"step-(\d+)", path.name))]
    return sorted(found, reverse=True)


def newest_valid(root: Path, report: Callable[[str], None]) -> FoundCheckpoint | None:
    """Find the newest valid checkpoint; each invalid one is reported and skipped."""
    for step, path in list_checkpoints(root):
        if (problem := problem_with(path)) is not None:
            report(f"checkpoint {path} is passed over: {problem}")
            continue
        return FoundCheckpoint(step=step, path=path, state=_read_state(path))
    return None


def best_scored(root: Path, newest: int, metric: str, *, lowest: bool) -> FoundCheckpoint | None:
    """Find the checkpoint with the best score by this metric, up to step `newest`; the earliest among equals. None
    where no checkpoint has a score."""
    best: FoundCheckpoint | None = None
    for step, path in reversed(list_checkpoints(root)):
        state = {} if step > newest or _state_problem(path) is not None else _read_state(path)
        score = (state.get(SCORE) or {}).get(metric)
        if score is not None and (best is None or is_better(score, best.state[SCORE][metric], lowest=lowest)):
            best = FoundCheckpoint(step=step, path=path, state=state)
    return best


def is_better(score: float, other: float, *, lowest: bool) -> bool:
    """Whether `score` is better than `other`; with `lowest` the smaller one is better."""
    return score < other if lowest else score > other


def prune(root: Path, newest: int, keep: int, best: FoundCheckpoint | None = None) -> None:
    """Keep the last `keep` checkpoints up to step `newest`, the one just saved, and the best. Remove all others: older
    ones, those past `newest`, which were skipped when the run resumed, and the remains of interrupted saves."""
    found = list_checkpoints(root)
    kept = [path for step, path in found if step <= newest][:keep]
    if best is not None:
        kept.append(best.path)
    for _, path in found:
        if path not in kept:
            shutil.rmtree(path)
    for path in root.glob(".step-*.tmp"):
        shutil.rmtree(path)
