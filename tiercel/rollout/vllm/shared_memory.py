"""Removal of names in shared memory that a run with vLLM may leave. Tensor-parallel ranks on CPUs find each other by
them.

Under a launcher, vLLM makes these names from the ranks only, refuses a name that exists, and leaves it behind if a
process is ended by a signal. The next run on the machine would then not start. The names are needed only until the
ranks have met.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tiercel.distributed.ranks import Ranks
from tiercel.regular_files import open_to_append

SHARED_MEMORY = Path("/dev/shm")
NAMES = "*tp:*-cpushm_*"


@contextmanager
def meeting_by_name(ranks: Ranks, tensor_parallel: int) -> Iterator[None]:
    """Wrap the start of vLLM, so that the ranks of only one run at a time meet on a machine. Names of earlier runs are
    removed before, and those of this run after."""
    if tensor_parallel == 1 or torch.cuda.is_available() or not SHARED_MEMORY.is_dir():
        yield
        return
    with open_to_append(SHARED_MEMORY / f"tiercel-vllm-{os.getuid()}.lock") as lock:
        if ranks.local_rank == 0:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _remove(set(SHARED_MEMORY.glob(NAMES)) - _names_held_by("[0-9]*"))
        ranks.all_gather(None)
        yield
        ranks.all_gather(None)
        _remove(_names_held_by("self"))


def _remove(names: set[Path]) -> None:
    """Remove names of shared memory, except those of other users. Processes that use the memory keep it."""
    for name in names:
        try:
            name.unlink(missing_ok=True)
        except PermissionError:
            continue


def _names_held_by(processes: str) -> set[Path]:
    """Return the names that are mapped by processes whose entries in /proc match the pattern."""
    held = set()
    for maps in Path("/proc").glob(f"{processes}/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:  # the process has ended, or is another user's
            continue
        paths = [Path(line.split(maxsplit=5)[5]) for line in lines if str(SHARED_MEMORY) in line]
        held |= {path for path in paths if path.match(NAMES)}
    return held
