"""Block sizes of FlexAttention's kernels, by the size of the heads, and whether they fit the GPU that is there.

PyTorch's own choice needs more shared memory than consumer cards have for heads above 128, and spills registers to
memory where it fits. These were compiled for each card of docs/gpu.md: they fit on all of them.
"""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries and keys that a block of threads holds at once, the loads that are ahead, and its warps."""

    queries: int
    keys: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class Kernels:
    """The tiles of the forward pass (None: PyTorch's own) and of the backward pass, whose tiles are square."""

    forward: Tile | None
    backward: Tile

    @property
    def options(self) -> dict[str, Any]:
        """Return `kernel_options` of PyTorch's flex_attention. Rows are whole blocks, so that no load needs a guard."""
        back = self.backward
        blocks = {"bwd_BLOCK_M1": back.queries, "bwd_BLOCK_N1": back.keys}
        blocks |= {"bwd_BLOCK_M2": back.keys, "bwd_BLOCK_N2": back.queries}
        options = {"IS_DIVISIBLE": True, **blocks, "bwd_num_stages": back.stages, "bwd_num_warps": back.warps}
        if self.forward is not None:
            options |= {"fwd_BLOCK_M": self.forward.queries, "fwd_BLOCK_N": self.forward.keys}
            options |= {"fwd_num_stages": self.forward.stages, "fwd_num_warps": self.forward.warps}
        return options


# By bytes of a number and the largest head that they are for.
KERNELS = {
    2: {
        64: Kernels(Tile(128, 64, 3, 8), Tile(64, 64, 2, 8)),
        128: Kernels(None, Tile(64, 64, 2, 8)),
        256: Kernels(None, Tile(32, 32, 2, 8)),
        512: Kernels(Tile(32, 32, 1, 8), Tile(16, 16, 1, 4)),
    },
    4: {
        64: Kernels(Tile(32, 32, 2, 8), Tile(32, 32, 2, 8)),
        128: Kernels(Tile(32, 32, 2, 8), Tile(32, 32, 2, 8)),
        256: Kernels(Tile(16, 16, 2, 4), Tile(16, 16, 2, 8)),
        512: Kernels(Tile(16, 16, 1, 4), Tile(16, 16, 1, 8)),
    },
}


def kernel_options(head_size: int, dtype: torch.dtype) -> Any:
    """Choose the options of FlexAttention's kernels; None, PyTorch's own, for heads above 512."""
    for largest, kernels in KERNELS[min(dtype.itemsize, 4)].items():
        if head_size <= largest:
            return kernels.options
    return None
