"""Checkpoints: written to a temporary directory, hashed, and renamed as the last step. A run resumes from the newest
valid one."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tiercel.errors import RunError
from tiercel.log import logger
from tiercel.regular_files import LARGEST_FILE, OddFile, read_regular, remove
from tiercel.runs.files import file_sha256, fsync, write_atomically
from tiercel.writing import let_others_read

MANIFEST = "MANIFEST.json"
STATE = "state.json"
_LASTING = frozenset((  # errors that would occur again, because a file is missing or is not one that a run writes
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EINVAL, errno.EFBIG, errno.ENAMETOOLONG,
))  # fmt: skip
SCORE = "score"  # in the state of a checkpoint that was evaluated: the metric's name and its value
LATE_SCORE = "score.json"  # has the same if the evaluation was made after the checkpoint; it is in no manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCheckpoint:
    """A checkpoint in which each file has the hash that the manifest lists."""

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
    are added, everything is flushed to disk, and the directory is renamed. A valid checkpoint of the same step is left
    as it is. Raises RunError, before anything is written, if the disk has less than `expected_bytes` free."""
    temporary = begin_checkpoint(root, step, expected_bytes=expected_bytes)
    if temporary is None:
        return directory_of(root, step)
    write(temporary)
    return complete_checkpoint(temporary, step, state)


def begin_checkpoint(root: Path, step: int, *, expected_bytes: int = 0) -> Path | None:
    """Create the temporary directory of a checkpoint and return it, for `complete_checkpoint`. Returns None if the step
    already has a valid checkpoint. Raises RunError if the disk has less than `expected_bytes` free."""
    final = directory_of(root, step)
    if final.exists() and problem_with(final) is None:  # replacing it would leave a moment without a checkpoint
        return None
    temporary = root / f".{final.name}.tmp"
    remove_unfinished(root)  # of any step: it would take the space of this one
    remove(temporary)
    root.mkdir(parents=True, exist_ok=True)
    require_space(root, expected_bytes)
    temporary.mkdir()
    return temporary


def complete_checkpoint(
    temporary: Path, step: int, state: dict[str, Any], known: Mapping[str, str] = MappingProxyType({})
) -> Path:
    """Add the state and the manifest, flush everything to disk, rename the directory and return its new path. `known`
    maps the names of files that the ranks have already flushed and hashed to their sha256."""
    write_atomically(temporary / STATE, json.dumps({"step": step, **state}, indent=1, sort_keys=True))
    let_others_read(temporary)
    files = {path.relative_to(temporary).as_posix(): path for path in sorted(temporary.rglob("*")) if path.is_file()}
    assert known.keys() <= files.keys()
    hashes = {name: known[name] if name in known else file_sha256(path) for name, path in files.items()}
    for name, path in files.items():
        if name not in known:
            fsync(path)
    write_atomically(temporary / MANIFEST, json.dumps({"sha256": hashes}, indent=1, sort_keys=True))
    for directory in (temporary, *(path for path in temporary.rglob("*") if path.is_dir())):
        fsync(directory)
    root, final = temporary.parent, directory_of(temporary.parent, step)
    if os.path.lexists(final):
        set_aside(final)
    temporary.rename(final)
    fsync(root)
    return final


def require_space(directory: Path, needed: int) -> None:
    """Raise RunError if the disk of `directory` has less than `needed` bytes free."""
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise RunError(
            f"{directory}: the checkpoint needs {needed:,} bytes, but the disk has only {free:,} free; make room "
            "there or lower train.keep; run the same command again to resume from the newest checkpoint"
        )


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that cannot be used to `step-N.damaged`, or `step-N.damaged-2` if that name is taken, and
    return its new path. Nothing in it is changed."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.damaged" + (f"-{number}" if number > 1 else ""))):
        number += 1
    return path.rename(aside)


def problem_with(path: Path) -> str | None:
    """Return why a checkpoint cannot be used, or None if it can. Only the files that its manifest lists are checked:
    whatever a file system, a copy or a person left next to them does not matter."""
    if path.is_symlink():
        return "it is a link; a run goes on from what is in its own directory"
    hashes = _stated_hashes(path / MANIFEST)
    if hashes is None:
        return f"{MANIFEST} is missing or unreadable"
    if STATE not in hashes:
        return f"{STATE} is not in the manifest"
    for name, expected in hashes.items():
        if _leads_out(path, name):
            return f"{MANIFEST} lists {name!r}, which is not in the checkpoint"
        if (problem := _file_problem(path / name, expected)) is not None:
            return f"{name} {problem}"
    return _state_problem(path)


def _stated_hashes(manifest: Path) -> dict[str, Any] | None:
    try:
        hashes = json.loads(read_regular(manifest))["sha256"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        _require_lasting(error, manifest)
        return None
    return hashes if isinstance(hashes, dict) else None


def _leads_out(path: Path, name: str) -> bool:
    """Return whether a name in a manifest leads to a file outside the checkpoint."""
    try:
        return not (path / name).parent.resolve().is_relative_to(path.resolve())
    except (OSError, ValueError, RuntimeError) as error:
        _require_lasting(error, path)
        return True


def _require_lasting(error: Exception, file: Path) -> None:
    """Raise RunError for an error that says nothing about what a file holds, such as ESTALE of a network's file system:
    a checkpoint that cannot be read now may be whole."""
    if isinstance(error, OSError) and not isinstance(error, OddFile) and error.errno not in _LASTING:
        raise RunError(
            f"{file}: cannot be read now: {error.strerror or error}; nothing was changed; run the same command again "
            "when it can be read, or move the checkpoint away"
        ) from error


def _file_problem(file: Path, expected: Any) -> str | None:
    try:
        if not file.is_file():
            return "is missing"
        if file.suffix == ".json" and (size := file.stat().st_size) > LARGEST_FILE:  # a sparse file may claim any size
            return f"has {size:,} bytes"
        return None if file_sha256(file) == expected else "does not have the sha256 of the manifest"
    except OSError as error:
        _require_lasting(error, file)
        return f"cannot be read: {error.strerror or error}"


def _state_problem(path: Path) -> str | None:
    """Return why the state cannot be used. A checkpoint under another step's name is refused because the data would
    continue from the wrong row."""
    try:
        state = _read_state(path)
    except (OSError, ValueError, RecursionError) as error:
        _require_lasting(error, path / STATE)
        return f"{STATE} is not JSON"
    if not isinstance(state, dict) or state.get("step") != int(path.name.removeprefix("step-")):
        return f"{STATE} is not of this step"
    return None


def _read_state(path: Path) -> Any:
    return json.loads(read_regular(path / STATE))


def list_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """List the directories that are named like a checkpoint with their steps, valid or not, newest first."""
    if not root.is_dir():
        return []
    names = {path: match for path in root.iterdir() if (match := re.fullmatch(r"step-(\d{6,})", path.name))}
    return sorted(((int(match[1]), path) for path, match in names.items() if path.is_dir()), reverse=True)


def of_step(root: Path, step: int) -> FoundCheckpoint:
    """Return the checkpoint of a step. Raises RunError if there is none, naming those that exist, or if it is
    damaged."""
    path = directory_of(root, step)
    if not path.is_dir():
        steps = ", ".join(str(each) for each, _ in reversed(list_checkpoints(root))) or "none"
        raise RunError(f"{root.parent} has no checkpoint of step {step}; there are: {steps}")
    if (problem := problem_with(path)) is not None:
        raise RunError(f"checkpoint {path} is damaged: {problem}; name another step")
    return FoundCheckpoint(step=step, path=path, state=_read_state(path))


def newest_valid(root: Path, report: Callable[[str], None]) -> FoundCheckpoint | None:
    """Return the newest valid checkpoint. Each invalid one is reported and skipped."""
    for step, path in list_checkpoints(root):
        if (problem := problem_with(path)) is not None:
            report(f"checkpoint {path} is passed over: {problem}")
            continue
        return FoundCheckpoint(step=step, path=path, state=_read_state(path))
    return None


def best_scored(root: Path, newest: int, metric: str, *, lowest: bool) -> FoundCheckpoint | None:
    """Return the checkpoint up to step `newest` with the best score by this metric, the earliest if several are equal.
    Returns None if no checkpoint has a score."""
    scored = []
    for step, path in reversed(list_checkpoints(root)):
        if step <= newest and not path.is_symlink() and _state_problem(path) is None:
            state = _read_state(path)
            with suppress(OSError, ValueError):  # there is none, as a rule
                state[SCORE] = json.loads(read_regular(path / LATE_SCORE))
            found = FoundCheckpoint(step=step, path=path, state=state)
            if (found.state.get(SCORE) or {}).get(metric) is not None:
                scored.append(found)
    best = min if lowest else max  # both return the first of equals
    return best(scored, key=lambda found: found.state[SCORE][metric], default=None)


def is_better(score: float, other: float, *, lowest: bool) -> bool:
    """Return whether `score` is better than `other`. With `lowest` the smaller one is better."""
    return score < other if lowest else score > other


def prune(root: Path, newest: int, keep: int, best: FoundCheckpoint | None = None) -> None:
    """Keep the last `keep` checkpoints up to step `newest`, which was just saved, and the best. Remove older ones, and
    what interrupted saves left behind. A directory without a manifest and a link do not belong to this run and stay; so
    does anything that somebody put into a checkpoint. Log a warning for what cannot be removed."""
    older = [path for step, path in list_checkpoints(root) if step <= newest and _is_own(path)][keep:]
    for path in older:
        if best is None or path != best.path:
            with _telling_what_stays(path):
                _remove_own(path)
    remove_unfinished(root)


def remove_unfinished(root: Path) -> None:
    """Remove what interrupted saves left behind. Log a warning for what cannot be removed."""
    for path in root.glob(".step-*.tmp"):
        if re.fullmatch(r"\.step-\d{6,}\.tmp", path.name) and path.is_dir() and not path.is_symlink():
            with _telling_what_stays(path):
                shutil.rmtree(path)


@contextmanager
def _telling_what_stays(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.warning(f"{path} is no longer needed, but cannot be removed: {error.strerror or error}")


def _is_own(path: Path) -> bool:
    return not path.is_symlink() and STATE in (_stated_hashes(path / MANIFEST) or {})


def _remove_own(path: Path) -> None:
    """Remove the files that the manifest lists, then the manifest, which until then shows whose directory it is, then
    the empty folders."""
    names = [name for name in _stated_hashes(path / MANIFEST) or {} if not _leads_out(path, name)]
    files = [file for name in names if (file := path / name).is_file() or file.is_symlink()]
    for file in (*files, path / LATE_SCORE, path / MANIFEST):
        file.unlink(missing_ok=True)
    folders = {folder for file in files for folder in file.parents if folder != path and folder.is_relative_to(path)}
    for folder in (*sorted(folders, reverse=True), path):
        with suppress(OSError):  # the folder contains somebody else's files
            folder.rmdir()
