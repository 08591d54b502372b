"""Group the ranks that compute each pack together (train.context_parallel)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tiercel.distributed.ranks import Ranks
from tiercel.errors import EnvironmentProblem

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextGroup:
    """Names the ranks that compute a pack together. Each has two chunks of its tokens (packing/context_parallel.py)."""

    place: int  # the position of this rank among them
    size: int  # W
    processes: Any  # their group in torch.distributed

    def gathered(self, tensors_S: Sequence[Tensor], dim: int) -> tuple[Tensor, ...]:
        """Join what all ranks have for their tokens, in the order of the pack. `dim` is the dimension of the tokens.
        All ranks must call it in the same way, and run the same backward pass through it."""
        return _Gathered.apply(self, dim, *tensors_S)

    def chunks(self, tensor_T: Tensor, dim: int) -> list[Tensor]:
        """Return the parts of all ranks, in their order."""
        cut = tensor_T.chunk(2 * self.size, dim)
        return [torch.cat([cut[place], cut[-1 - place]], dim) for place in range(self.size)]


def context_group(ranks: Ranks, size: int, device: torch.device) -> ContextGroup | None:
    """Make the group of `size` consecutive ranks that this rank belongs to; None for a size of 1. All ranks call it at
    once. Raises EnvironmentProblem if the number of ranks is not a multiple of the size."""
    if size == 1:
        return None
    if ranks.world_size % size:
        raise EnvironmentProblem(
            f"train.context_parallel: is {size}, but must divide the number of ranks ({ranks.world_size}); start a "
            "different number of ranks, or use another size"
        )
    mesh = init_device_mesh(device.type, (ranks.world_size // size, size), mesh_dim_names=("groups", "context"))
    return ContextGroup(place=ranks.rank % size, size=size, processes=mesh.get_group("context"))


def exchanged(ranks: Ranks, context: ContextGroup, value: T) -> Sequence[T]:
    """Return the value of each rank of the group, in their order."""
    found: list[T] = []
    with ranks.heartbeat.collective("exchange of what ranks compute together"):
        for place in range(context.size):
            # One after the other, because a gather would allocate room for the largest value once for each rank.
            slot = [value] if place == context.place else [None]
            dist.broadcast_object_list(slot, group=context.processes, group_src=place, device=torch.device("cpu"))
            found.append(value if place == context.place else slot[0])  # type: ignore[arg-type]
    return found


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ContextGroup, dim: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.dim = group, dim
        found = []
        for tensor in tensors:
            parts = tensor.new_empty(group.size, *tensor.shape)
            dist.all_gather_into_tensor(parts, tensor.contiguous()[None], group.processes)
            halves = [part.chunk(2, dim) for part in parts]
            found.append(torch.cat([first for first, _ in halves] + [last for _, last in reversed(halves)], dim))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        found: list[Tensor | None] = []
        for gradient, is_needed in zip(gradients, ctx.needs_input_grad[2:], strict=True):
            if not is_needed:
                found.append(None)
                continue
            # In half precision the sum would be rounded.
            parts = torch.stack(ctx.group.chunks(gradient.float(), ctx.dim))
            own = torch.empty_like(parts[:1])
            dist.reduce_scatter_tensor(own, parts, group=ctx.group.processes)
            found.append(own[0].to(gradient.dtype))
        return None, None, *found
