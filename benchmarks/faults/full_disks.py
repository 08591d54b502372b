"""A disk that is full at any byte of a save: a plain error names the directory, and the last checkpoint stays.

A limit on the size of a file represents the full disk, because the system refuses the byte beyond it in the same way.
If a small memory disk can be mounted, that is really filled too.
"""

import resource
import shutil
import subprocess
import time
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from benchmarks.faults.child import Send, collect
from benchmarks.faults.figure import Figure, Outcome, Size, figure_of
from benchmarks.faults.tiny_run import TinyRun, chosen, hashes, make_tiny_run
from tiercel.errors import RunError
from tiercel.runs.checkpoints import directory_of, newest_valid

SECONDS = 120.0
STEPS_BETWEEN = 30  # number of limits between two bytes and the largest file
SHORT_STRIDE = 6
TMPFS_BYTES = 1 << 20
Usage = namedtuple("Usage", "total used free")


def full_disks(size: Size, seed: int, work_dir: Path) -> Figure:
    """Try every limit in its own child process, the estimate before the save, and a real small disk."""
    started = time.perf_counter()
    run = make_tiny_run(work_dir)
    path = work_dir / "run"
    run.save(path, 1)
    sizes = sorted({file.stat().st_size for file in directory_of(path / "checkpoints", 1).rglob("*") if file.is_file()})
    largest = sizes[-1]
    even = {largest * part // STEPS_BETWEEN for part in range(STEPS_BETWEEN + 1)}
    limits = sorted({0, 1, largest, *even, *(each - 1 for each in sizes), *sizes})

    def work(send: Send) -> None:
        for limit in chosen(limits, size, SHORT_STRIDE):
            send((f"files of at most {limit} bytes", _limited(run, path, limit, fits=limit >= largest)))
        for outcome in _foretold(run, path):
            send(outcome)

    outcomes, end = collect(work, SECONDS)
    if end is not None:
        outcomes.append(("the process that saves", end))
    on_disk = _on_a_small_disk(run, work_dir / "disk", size)
    return figure_of(
        "disk full at every file of a save",
        [*outcomes, *on_disk],
        seed=seed,
        seconds=time.perf_counter() - started,
        figures={"on_a_mounted_disk": len(on_disk)},
    )


def _limited(run: TinyRun, path: Path, limit: int, *, fits: bool) -> str | None:
    """Return what is wrong with a save under the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))  # SIGXFSZ is ignored by Python from its start
    try:
        problem = _save_problem(run, path, fits=fits)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    return problem or _aftermath(run, path)


def _save_problem(run: TinyRun, path: Path, *, fits: bool) -> str | None:
    before = hashes(directory_of(path / "checkpoints", 1))
    try:
        run.save(path, 2)
    except RunError as error:
        if fits:
            return f"refused though it fits: {error}"
        if str(path / "checkpoints") not in str(error):
            return f"the message names no directory: {error}"
    else:
        if not fits:
            return "the save passed"
    found = newest_valid(path / "checkpoints", lambda text: None)
    if found is None or found.step != (2 if fits else 1):
        return f"found {found and found.step}"
    if hashes(directory_of(path / "checkpoints", 1)) != before:
        return "the checkpoint before it changed"
    return None


def _aftermath(run: TinyRun, path: Path) -> str | None:
    """Return what is wrong with the same save once there is room. Afterwards, everything is as before."""
    run.save(path, 2)
    found = newest_valid(path / "checkpoints", lambda text: None)
    shutil.rmtree(directory_of(path / "checkpoints", 2))
    return None if found is not None and found.step == 2 else "the save after the full disk is not found"


def _foretold(run: TinyRun, path: Path) -> Iterator[Outcome]:
    """Test the estimate: the disk reports how much is free, and too little is refused before a byte is written."""
    strategy = run.trainer.strategy
    tensors = [*strategy.trained_weights().values(), *strategy.optimizer_tensors().values()]
    needed = sum(tensor.nbytes for tensor in tensors)
    for free in (0, needed - 1):
        with patch("shutil.disk_usage", lambda path, free=free: Usage(needed, needed, free)):
            yield f"{free} bytes free of {needed}", _refusal_problem(run, path, needed, free)
    with patch("shutil.disk_usage", lambda path: Usage(needed, 0, needed)):
        run.save(path, 2)
    yield f"{needed} bytes free of {needed}", _aftermath(run, path)


def _refusal_problem(run: TinyRun, path: Path, needed: int, free: int) -> str | None:
    try:
        run.save(path, 2)
    except RunError as error:
        words = (f"{path / 'checkpoints'}", f"{needed:,} bytes", f"{free:,} free", "train.keep")
        if missing := [word for word in words if word not in str(error)]:
            return f"the message lacks {missing}: {error}"
        left = sorted(entry.name for entry in (path / "checkpoints").iterdir())
        return None if left == ["step-000001"] else f"written all the same: {left}"
    return "the save passed"


def _on_a_small_disk(run: TinyRun, disk: Path, size: Size) -> list[Outcome]:
    """Return the outcomes of saves on a memory disk with less and less room, or none if it cannot be mounted."""
    outcomes: list[Outcome] = []
    with _mounted(disk) as is_mounted:
        if not is_mounted:
            return []
        path = disk / "run"
        run.save(path, 1)
        taken = sum(file.stat().st_size for file in directory_of(path / "checkpoints", 1).rglob("*") if file.is_file())
        rooms = [taken * part // STEPS_BETWEEN for part in range(STEPS_BETWEEN)]
        for room in chosen(rooms, size, SHORT_STRIDE):
            ballast = disk / "ballast"
            ballast.write_bytes(bytes(max(0, shutil.disk_usage(disk).free - room)))
            with patch("shutil.disk_usage", lambda path: Usage(TMPFS_BYTES, 0, TMPFS_BYTES)):  # none foretells it
                problem = _save_problem(run, path, fits=False)
            ballast.unlink()
            outcomes.append((f"about {room} bytes of room", problem or _aftermath(run, path)))
    return outcomes


@contextmanager
def _mounted(disk: Path) -> Iterator[bool]:
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(disk)]
    try:
        is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        is_mounted = False
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", str(disk)], check=True)
