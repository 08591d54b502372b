"""Attention of packed rows on a GPU: PyTorch's FlexAttention (Dong et al. 2024), compiled, with a block mask.

Rows of all lengths and layouts use the same few compiled graphs. Uncompiled, FlexAttention would hold all scores
(T x T for each head), so it never runs that way: one graph too many is an error.

Shape suffixes: docs/shapes.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tiercel.learner.block_mask import BLOCK, block_mask
from tiercel.learner.compiling import default_backend, few_graphs
from tiercel.learner.flex_kernels import kernel_options
from tiercel.learner.layout import BySight, PrefixLayout
from tiercel.models.attention import Layer
from tiercel.models.sight import Sight, Span

GRAPHS = 2  # of one model and dtype: with a gradient and without
GRAPH_LIMIT = 32  # of one process: a few models, dtypes and numbers of heads
LEAST_BLOCKS = 2  # PyTorch compiles anew for a size of 1
Attend = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """Counts the tokens that fill a row up to whole blocks."""

    front: int  # keys alone; before the prompt that was run earlier, so that the queries start with a block
    back: int  # queries and keys

    @classmethod
    def of(cls, queries: Sequence[Span]) -> "Padding":
        """Choose the least padding for queries in these spans: one to the end of the row, or whole blocks."""
        count = sum(stop - start for start, stop in queries)
        blocks = max(LEAST_BLOCKS, -(-count // BLOCK))
        return cls(front=-queries[0][0] % BLOCK, back=blocks * BLOCK - count)

    def filled(self, queries: Sequence[Span]) -> tuple[Span, ...]:
        """Return the spans of the queries in the filled row, with what fills their end."""
        *others, (start, stop) = [(start + self.front, stop + self.front) for start, stop in queries]
        return (*others, (start, stop + self.back))


def _filled(tensor_BATE: Tensor, front: int, back: int) -> Tensor:
    """Add zeros along T. The result (B, T, A, E) is contiguous and no view, also without padding: PyTorch would compile
    anew for other strides, and for views."""
    return torch.nn.functional.pad(tensor_BATE.transpose(1, 2), (0, 0, 0, 0, front, back)).contiguous()


class FlexAttention:
    """Computes the attention of a packed row with FlexAttention. `queries`: as in Padding; None: all. `attend`: the
    compiled function; by default that of the device. On a CPU, where PyTorch's kernel has no backward pass, graphs run
    operation by operation."""

    def __init__(
        self,
        layout: PrefixLayout,
        device: torch.device,
        queries: Sequence[Span] | None = None,
        attend: Attend | None = None,
    ):
        queries = queries or layout.after(0)
        self.padding = Padding.of(queries)
        padded, filled = layout.padded(self.padding.front, self.padding.back), self.padding.filled(queries)
        assert padded.length % BLOCK == 0, padded.length  # the kernels rely on it: flex_kernels.py
        self.masks = BySight(padded, lambda sight: block_mask(padded, device, filled, sight))
        self.attend = attend or compiled_flex(default_backend(device))

    def prepare(self, sight: Sight) -> None:
        self.masks.of(sight)

    def __call__(self, layer: Layer, query_BATE: Tensor, key_BJTE: Tensor, value_BJTE: Tensor) -> Tensor:
        if torch.is_grad_enabled() and any(t.requires_grad for t in (query_BATE, key_BJTE, value_BJTE)):
            # In the first layer some have no gradient; each combination would be another graph.
            query_BATE, key_BJTE, value_BJTE = (_with_gradient(t) for t in (query_BATE, key_BJTE, value_BJTE))
            return self._attended(layer, query_BATE, key_BJTE, value_BJTE)
        with torch.no_grad():
            return self._attended(layer, query_BATE, key_BJTE, value_BJTE)

    def _attended(self, layer: Layer, query_BATE: Tensor, key_BJTE: Tensor, value_BJTE: Tensor) -> Tensor:
        front, back = self.padding.front, self.padding.back
        keys, values = _filled(key_BJTE, front, back), _filled(value_BJTE, front, back)
        mask = self.masks.of(layer.sight)
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
    """Compile FlexAttention. The function raises TrainingError instead of compiling more than `limit` graphs."""
    compiled = torch.compile(_attention, dynamic=True, fullgraph=True, backend=backend)
    message = (
        f"learner.form: flex would compile more than {limit} graphs in this process, and without compiling it would "
        "hold all scores; write learner.form: dense for short rows, and report the recipe, please"
    )

    def attend(*inputs: Any) -> Tensor:
        with few_graphs(limit, message):
            return compiled(*inputs)

    return attend
