"""A rank of a run whose saves and restores are watched: `tiercel` with small files, and lines for the test.

torchrun --nproc-per-node 2 -m tests.distributed.shards_worker BYTES sft RECIPE [key=value ...]
"""

import gc
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tiercel.cli.main import main
from tiercel.distributed.strategies.shard_files import SavedTensors
from tiercel.distributed.strategies.sharded import Sharded
from tiercel.training import checkpoints

WHOLE: weakref.WeakSet[Tensor] = weakref.WeakSet()  # gathered and not dropped yet


def say(text: str) -> None:
    print(f"rank {os.environ['RANK']}: {text}", flush=True)


def watch_saves() -> None:
    """Print the largest number of bytes of gathered tensors that the rank had at once while it saved weights."""
    gather, parts = Sharded._whole, Sharded.model_parts
    held: list[int] = []

    def gathered(self: Sharded, tensor: Tensor) -> Tensor:
        whole = gather(self, tensor)
        if whole is not tensor:  # one that the ranks share
            WHOLE.add(whole)
        gc.collect()
        held.append(sum(each.nbytes for each in WHOLE))
        return whole

    def counted(self: Sharded, most_bytes: int) -> Iterator[dict[str, Tensor]]:
        held.clear()
        WHOLE.clear()
        yield from parts(self, most_bytes)
        say(f"held {max(held)}")

    Sharded._whole = gathered  # type: ignore[method-assign]
    Sharded.model_parts = counted  # type: ignore[method-assign]


def watch_restores() -> None:
    """Print how many bytes of moments a rank has read, and whether all ranks together have what was saved."""
    restore, read = Sharded.restore, SavedTensors._read
    bytes_read = 0

    def counted(self: SavedTensors, *arguments: Any) -> Tensor:
        nonlocal bytes_read
        tensor = read(self, *arguments)
        bytes_read += tensor.nbytes
        return tensor

    def compared(self: Sharded, tensors: SavedTensors, scaler_state: Mapping[str, Any]) -> None:
        restore(self, tensors, scaler_state)
        say(f"read {bytes_read}")
        found = self.optimizer_tensors()
        if self.ranks.is_first:
            is_same = set(found) == set(tensors) and all(torch.equal(found[name], tensors[name]) for name in found)
            say(f"restored {sum(each.nbytes for each in found.values())}, {'equal' if is_same else 'different'}")

    SavedTensors._read = counted  # type: ignore[method-assign]
    Sharded.restore = compared  # type: ignore[method-assign]


if __name__ == "__main__":
    checkpoints.FILE_BYTES = int(sys.argv[1])  # type: ignore[misc]
    watch_restores()
    watch_saves()
    sys.exit(main(sys.argv[2:]))
