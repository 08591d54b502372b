"""The names in shared memory by which the tensor-parallel ranks of a vLLM that computes on CPUs find each other.

Under a launcher vLLM names them after the ranks alone, refuses a name that exists, and leaves the names where a process
ends by a signal: the next run of that machine would not start. A name is needed only until the ranks have met.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tiercel.distributed.ranks import Ranks

SHARED_MEMORY = Path("/dev/shm")
NAMES = "*tp:*-cpushm_*"


@contextmanager
def meeting_by_name(ranks: Ranks, tensor_parallel: int) -> Iterator[None]:
    """The ranks of one run at a time meet on a machine, behind names that no run is left with."""
    if tensor_parallel == 1 or torch.cuda.is_available() or not SHARED_MEMORY.is_dir():
        yield
        return
    is_first_of_machine = os.environ.get("LOCAL_RANK", "0") == "0"
    with (SHARED_MEMORY / f"tiercel-vllm-{os.getuid()}.lock").open("a") as lock:
        if is_first_of_machine:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _remove(set(SHARED_MEMORY.glob(NAMES)) - _names_held_by("[0-9]*"))
        ranks.gather(None)
        yield
        ranks.gather(None)
        _remove(_names_held_by("self"))


def _remove(names: set[Path]) -> None:
    """The memory itself lives on in the processes that hold it. A name of another user stays."""
    for name in names:
        try:
            name.unlink(missing_ok=True)
        except PermissionError:
            continue


def _names_held_by(processes: str) -> set[Path]:
    """Of the processes that /proc shows under these names."""
    held = set()
    for maps in Path("/proc").glob(f"{processes}/maps"):
        try:
            lines = maps.read_text().splitlines()
        except OSError:  # ended meanwhile, or another user's
            continue
        paths = [Path(line.split(maxsplit=5)[5]) for line in lines if str(SHARED_MEMORY) in line]
        held |= {path for path in paths if path.match(NAMES)}
    return held
