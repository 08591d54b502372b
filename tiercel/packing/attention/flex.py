"""Attention of packed rows on a GPU, with PyTorch's FlexAttention (Dong et al. 2024), compiled, and a block mask.

Rows of all lengths and layouts use the same few compiled graphs. Uncompiled, FlexAttention would hold all scores (T x T
for each head), so it never runs that way; one graph too many is an error.

Shape suffixes: docs/shapes.md.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tiercel.models.layers.attention import Heads, Layer, heads_of
from tiercel.models.layers.attention_span import Span
from tiercel.models.weights.memory_errors import is_out_of_memory
from tiercel.packing.attention.block_mask import BLOCK, block_mask
from tiercel.packing.compiling import default_backend, few_graphs
from tiercel.packing.tree import ByAttentionSpan, PrefixTree, groups_tree
from tiercel.reliability.card_faults import plain_reason


@dataclass(frozen=True, slots=True)
class KernelTile:
    """The queries and keys that a block of threads holds at once, the loads it prefetches, and its warps."""

    queries: int
    keys: int
    stages: int
    warps: int


@dataclass(frozen=True, slots=True)
class Kernels:
    """The tiles of the forward pass (None: PyTorch's own) and of the backward pass, whose tiles are square."""

    forward: KernelTile | None
    backward: KernelTile

    @property
    def options(self) -> dict[str, Any]:
        """Return `kernel_options` for PyTorch's flex_attention. Rows are whole blocks, so no load needs a guard."""
        back = self.backward
        blocks = {"bwd_BLOCK_M1": back.queries, "bwd_BLOCK_N1": back.keys}
        blocks |= {"bwd_BLOCK_M2": back.keys, "bwd_BLOCK_N2": back.queries}
        options = {"IS_DIVISIBLE": True, **blocks, "bwd_num_stages": back.stages, "bwd_num_warps": back.warps}
        if self.forward is not None:
            options |= {"fwd_BLOCK_M": self.forward.queries, "fwd_BLOCK_N": self.forward.keys}
            options |= {"fwd_num_stages": self.forward.stages, "fwd_num_warps": self.forward.warps}
        return options


# By the bytes of a number and the largest head size that they serve.
KERNELS = {
    2: {
        64: Kernels(KernelTile(128, 64, 3, 8), KernelTile(64, 64, 2, 8)),
        128: Kernels(None, KernelTile(64, 64, 2, 8)),
        256: Kernels(None, KernelTile(32, 32, 2, 8)),
        512: Kernels(KernelTile(32, 32, 1, 8), KernelTile(16, 16, 1, 4)),
    },
    4: {
        64: Kernels(KernelTile(32, 32, 2, 8), KernelTile(32, 32, 2, 8)),
        128: Kernels(KernelTile(32, 32, 2, 8), KernelTile(32, 32, 2, 8)),
        256: Kernels(KernelTile(16, 16, 2, 4), KernelTile(16, 16, 2, 8)),
        512: Kernels(KernelTile(16, 16, 1, 4), KernelTile(16, 16, 1, 8)),
    },
}


def kernel_options(head_size: int, dtype: torch.dtype) -> Any:
    """Choose the options of FlexAttention's kernels, or None (PyTorch's own choice) for heads larger than 512."""
    for largest, kernels in KERNELS[min(dtype.itemsize, 4)].items():
        if head_size <= largest:
            return kernels.options
    return None


GRAPHS = 2  # for one model and dtype: with a gradient and without
GRAPH_LIMIT = 32  # in one process: a few models, dtypes and numbers of heads
LEAST_BLOCKS = 2  # PyTorch recompiles for a size of 1
Attend = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """The number of tokens that fill a row up to whole blocks."""

    front: int  # keys only; before a prompt that was run earlier, so that the queries start at a block
    back: int  # queries and keys

    @classmethod
    def of(cls, queries: Sequence[Span]) -> "Padding":
        """Choose the least padding for queries in these spans: a single span to the end of the row, or whole blocks."""
        count = sum(stop - start for start, stop in queries)
        blocks = max(LEAST_BLOCKS, -(-count // BLOCK))
        return cls(front=-queries[0][0] % BLOCK, back=blocks * BLOCK - count)

    def filled(self, queries: Sequence[Span]) -> tuple[Span, ...]:
        """Return the spans of the queries in the filled row, including the padding at their end."""
        *others, (start, stop) = [(start + self.front, stop + self.front) for start, stop in queries]
        return (*others, (start, stop + self.back))


def _filled(tensor_BATE: Tensor, front: int, back: int) -> Tensor:
    """Add zeros along T. The result (B, T, A, E) is contiguous and not a view, even without padding, because PyTorch
    would recompile for other strides and for views."""
    return torch.nn.functional.pad(tensor_BATE.transpose(1, 2), (0, 0, 0, 0, front, back)).contiguous()


class FlexAttention(ByAttentionSpan[Any]):
    """The attention of a packed row, computed with FlexAttention. `queries`: as in Padding; None means all tokens.
    `attend`: the compiled function; by default the one for the device. On a CPU, where PyTorch's kernel has no backward
    pass, graphs run operation by operation."""

    def __init__(
        self,
        tree: PrefixTree,
        device: torch.device,
        queries: Sequence[Span] | None = None,
        attend: Attend | None = None,
    ):
        queries = queries or tree.after(0)
        self.padding = Padding.of(queries)
        padded, filled = tree.padded(self.padding.front, self.padding.back), self.padding.filled(queries)
        assert padded.length % BLOCK == 0, padded.length  # the kernels rely on it: flex_kernels.py
        super().__init__(padded, lambda attention_span: block_mask(padded, device, filled, attention_span))
        self.attend = attend or compiled_flex(default_backend(device))

    def __call__(self, layer: Layer, query_BATE: Tensor, key_BJTE: Tensor, value_BJTE: Tensor) -> Tensor:
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in (query_BATE, key_BJTE, value_BJTE))
        if learns:  # in the first layer some of them have no gradient; each combination would be another graph
            query_BATE, key_BJTE, value_BJTE = (_with_gradient(t) for t in (query_BATE, key_BJTE, value_BJTE))
        front, back = self.padding.front, self.padding.back
        mask = self.prepare(layer.attention_span)
        with torch.set_grad_enabled(learns):
            keys, values = _filled(key_BJTE, front, back), _filled(value_BJTE, front, back)
            output_BTAE = self.attend(_filled(query_BATE, 0, back), keys, values, mask, layer.scale)
            return output_BTAE[:, : query_BATE.shape[2]].transpose(1, 2)


def _with_gradient(tensor: Tensor) -> Tensor:
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()


def _attention(query_BTAE: Tensor, key_BTJE: Tensor, value_BTJE: Tensor, mask: Any, scale: float) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    query_BATE, key_BJTE, value_BJTE = (tensor.transpose(1, 2) for tensor in (query_BTAE, key_BTJE, value_BTJE))
    options = kernel_options(query_BATE.shape[-1], query_BATE.dtype) if query_BATE.is_cuda else None
    output_BATE = flex_attention(
        query_BATE, key_BJTE, value_BJTE, block_mask=mask, scale=scale, enable_gqa=True, kernel_options=options
    )
    return output_BATE.transpose(1, 2)


@cache
def compiled_flex(backend: Any = "inductor", limit: int = GRAPH_LIMIT) -> Attend:
    """Compile FlexAttention. The returned function raises TrainingError instead of compiling more than `limit`
    graphs."""
    compiled = torch.compile(_attention, dynamic=True, fullgraph=True, backend=backend)
    message = (
        f"learner.form: flex would compile more than {limit} graphs in this process, and without compiling it would "
        "hold all scores; write learner.form: dense for short rows, and report the recipe, please"
    )

    def attend(*inputs: Any) -> Tensor:
        with few_graphs(limit, message):
            return compiled(*inputs)

    return attend


_NEEDS = re.compile(r"Required: (\d+)\D+Hardware limit: ?(\d+)")


def flex_obstacle(config: Any, dtype: torch.dtype, device: torch.device, *, learns: bool) -> str | None:
    """Return why the GPU cannot run the attention of a decoder with this config, or None if it can. The kernels are
    those of the run, which then does not need to compile them again. `learns` includes the backward pass."""
    for heads in sorted(set(heads_of(config))):
        if obstacle := _obstacle(config.num_attention_heads, heads, dtype, device, learns):
            return obstacle
    return None


@cache
def _obstacle(query_heads: int, heads: Heads, dtype: torch.dtype, device: torch.device, learns: bool) -> str | None:
    tree = groups_tree((BLOCK, BLOCK))
    query, key, value = (
        torch.zeros(1, count, tree.length, heads.size, device=device, dtype=dtype, requires_grad=learns)
        for count in (query_heads, heads.keys, heads.keys)
    )
    try:
        with torch.set_grad_enabled(learns):
            output = FlexAttention(tree, device)(Layer(index=0, scale=heads.size**-0.5), query, key, value)
        if learns:
            output.sum().backward()
    except RuntimeError as error:  # from the compiler, whose own error classes differ by version
        if is_out_of_memory(error) and _NEEDS.search(str(error)) is None:
            raise
        return f"cannot be compiled for heads of {heads.size} in {dtype} on {_name(device)}: {reason_of(error)}"
    return None


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def reason_of(error: RuntimeError) -> str:
    """Return the card's limit if the compiler names it, otherwise what a known failure means, or the first line of its
    message."""
    if needs := _NEEDS.search(str(error)):
        required, limit = map(int, needs.groups())
        return f"a block needs {required:,} bytes of shared memory, and the card has {limit:,}"
    return plain_reason(error)
