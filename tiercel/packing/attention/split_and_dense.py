"""Attention of the nodes of a prefix tree: each token attends to its node and to the node's ancestors.

`split` computes three kinds of small attentions without a mask and joins them by their log-sum-exp. Tests compare it
with the dense (T, T) mask of `PrefixTree`. The form for a GPU is in flex.py.

Shape suffixes: docs/shapes.md. Here R are the nodes of a bucket, padded to L tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from tiercel.devices import moved
from tiercel.models.layers.attention import Layer, attended
from tiercel.models.layers.attention_span import FULL, AttentionSpan, Span, sequence_masks
from tiercel.packing.tree import ByAttentionSpan, PrefixTree, shifted

PADDING_TOLERANCE = 1.25  # in a bucket the longest node has at most this many times the tokens of the shortest

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The attention of a span of queries over a span of keys."""

    queries: Span
    keys: Span
    is_causal: bool  # query i attends to keys 0..i of the span; otherwise to all keys, or as the bias says
    bias: Tensor | None = None  # fp32 (1, 1, S, K), -inf if a query does not see a key

    def after(self, first_query: int, device: torch.device) -> "Block":
        """Return the block on the device, with its queries counted from `first_query`."""
        bias = None if self.bias is None else moved(self.bias, device)
        return replace(self, queries=shifted(self.queries, -first_query), bias=bias)

    def rows(self, tensor_1AT: Tensor, *, of_keys: bool = False) -> Tensor:
        """Take the entries of its queries or keys: (1, A, S, ...)."""
        return tensor_1AT[:, :, slice(*(self.keys if of_keys else self.queries))]

    def put(self, rows_1AS: Tensor, total_1AT: Tensor) -> None:
        """Write the entries of its queries."""
        self.rows(total_1AT).copy_(rows_1AS)

    def add(self, rows_1AS: Tensor, total_1AT: Tensor, *, of_keys: bool = False) -> None:
        """Add to the entries of its queries or keys."""
        self.rows(total_1AT, of_keys=of_keys).add_(rows_1AS)

    def without_padding(self, rows_1ASE: Tensor) -> Tensor:
        """Return the rows as they are, because they have no padding."""
        return rows_1ASE


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """The causal attention of nodes of similar length, each over itself."""

    places_RL: Tensor  # int64, place among the queries; the padding repeats the last one
    is_padding_RL: Tensor  # bool
    valid: Tensor  # int64 (M,), the entries of places_RL (flattened) that are not padding
    valid_places: Tensor  # int64 (M,), the places at these entries
    key_offset: int  # place among the keys minus place among the queries
    bias: Tensor | None = None  # fp32 (R, 1, L, L), -inf if a token does not see another; None: causal

    @property
    def is_causal(self) -> bool:
        return self.bias is None

    def rows(self, tensor_1AT: Tensor, *, of_keys: bool = False) -> Tensor:
        """Gather the entries of its queries or keys: (R, A, L, ...)."""
        places_RL = self.places_RL + self.key_offset if of_keys else self.places_RL
        return tensor_1AT[0][:, places_RL].transpose(0, 1)

    def put(self, rows_RAL: Tensor, total_1AT: Tensor) -> None:
        """Write the entries of its queries."""
        total_1AT[0][:, self.valid_places] = self._flat(rows_RAL)

    def add(self, rows_RAL: Tensor, total_1AT: Tensor, *, of_keys: bool = False) -> None:
        """Add to the entries of its queries or keys."""
        total_AT = total_1AT[0]
        total_AT[:, self.valid_places + (self.key_offset if of_keys else 0)] += self._flat(rows_RAL)

    def without_padding(self, rows_RALE: Tensor) -> Tensor:
        """Make the padding 0, because it repeats real tokens."""
        return rows_RALE.masked_fill(self.is_padding_RL[:, None, :, None], 0.0)

    def _flat(self, rows_RAL: Tensor) -> Tensor:
        """Put rows one after another, without their padding: (A, M, ...)."""
        return rows_RAL.transpose(0, 1).flatten(1, 2)[:, self.valid]


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitPlan:
    """What to compute: each node over itself, then the descendants of a node over that node, which are joined."""

    roots: tuple[Block, ...]
    buckets: tuple[Bucket, ...]  # the nodes that have a parent
    over: tuple[Block, ...]


def split_plan(
    tree: PrefixTree, device: torch.device, first_query: int = 0, attention_span: AttentionSpan = FULL
) -> SplitPlan:
    """Plan the attention of a packed row. The first `first_query` tokens have keys but no queries."""
    attention_span = tree.simplest(attention_span)
    own = [number for number, node in enumerate(tree.nodes) if node.span[0] >= first_query]
    roots = [_over_itself(tree, number, attention_span) for number in own if tree.nodes[number].parent is None]
    others = [number for number in own if tree.nodes[number].parent is not None]
    over = [block for number in range(len(tree.nodes)) for block in _over_ancestor(tree, number, attention_span)]
    buckets = []
    for numbers in similar(tree, others):
        bias = _own_bias(tree, numbers, attention_span)
        bucket = bucket_of(tree, numbers, first_query, device)
        buckets.append(replace(bucket, bias=None if bias is None else moved(bias, device)))
    return SplitPlan(
        roots=tuple(block.after(first_query, device) for block in roots),
        buckets=tuple(buckets),
        over=tuple(block.after(first_query, device) for block in over),
    )


def _over_itself(tree: PrefixTree, number: int, attention_span: AttentionSpan) -> Block:
    own, bias = tree.nodes[number].span, _own_bias(tree, [number], attention_span)
    return Block(queries=own, keys=own, is_causal=bias is None, bias=bias)


def _own_bias(tree: PrefixTree, numbers: Sequence[int], attention_span: AttentionSpan) -> Tensor | None:
    """Compute the bias (R, 1, L, L) of nodes, each over itself; None if all are causal."""
    length = max(tree.nodes[number].size for number in numbers)
    picture_spans = list(map(tree.picture_spans_in, numbers))
    attention_span = attention_span.within(length, [span for of_row in picture_spans for span in of_row])
    return None if attention_span.is_causal else _bias(sequence_masks(attention_span, length, picture_spans))


def _over_ancestor(tree: PrefixTree, number: int, attention_span: AttentionSpan) -> list[Block]:
    """Build the attention of a node's descendants over the node: one block for all of them, or, if a window limits what
    they see, one for each, because a query that saw no key would have no log-sum-exp."""
    (start, stop), subtree_stop, window = tree.nodes[number].span, tree.stops[number], attention_span.window
    after = range(number + 1, len(tree.nodes))
    below = list(takewhile(lambda each: tree.nodes[each].span[0] < subtree_stop, after))
    if not below:
        return []
    if window is None or max(map(tree.length_to, below)) - tree.depths[number] <= window:
        return [Block(queries=(stop, subtree_stop), keys=(start, stop), is_causal=False)]
    blocks = []
    for each in below:
        begin, end = tree.nodes[each].span
        # The number i of its tokens, from 0, sees the key that is number j before `stop` if i + j is at most `reach`.
        reach = window - 1 + tree.length_to(number) - tree.depths[each]
        if reach > 0:
            queries, keys = (begin, min(end, begin + reach)), (max(start, stop - reach), stop)
            sees_SK = torch.arange(queries[1] - begin)[:, None] + torch.arange(stop - keys[0], 0, -1) <= reach
            blocks.append(Block(queries=queries, keys=keys, is_causal=False, bias=_bias(sees_SK)[None, None]))
    return blocks


def _bias(sees: Tensor) -> Tensor:
    return torch.zeros(sees.shape).masked_fill(~sees, -torch.inf)


def similar(tree: PrefixTree, numbers: Sequence[int]) -> list[list[int]]:
    """Sort nodes by size, and start a new bucket when PADDING_TOLERANCE would be exceeded."""
    groups: list[list[int]] = []
    for number in sorted(numbers, key=lambda each: tree.nodes[each].size):
        if not groups or tree.nodes[number].size > PADDING_TOLERANCE * tree.nodes[groups[-1][0]].size:
            groups.append([])
        groups[-1].append(number)
    return groups


def bucket_of(tree: PrefixTree, numbers: Sequence[int], first_query: int, device: torch.device) -> Bucket:
    """Place nodes of similar size side by side. The first `first_query` tokens of the tree have no queries."""
    spans = torch.tensor([tree.nodes[number].span for number in numbers])
    lengths_R1 = spans.diff()
    order_L = torch.arange(int(lengths_R1.max()))
    places_RL = spans[:, :1] - first_query + torch.minimum(order_L, lengths_R1 - 1)
    is_padding_RL = order_L >= lengths_R1
    valid = (~is_padding_RL).flatten().nonzero()[:, 0]
    return Bucket(
        places_RL=moved(places_RL, device),
        is_padding_RL=moved(is_padding_RL, device),
        valid=moved(valid, device),
        valid_places=moved(places_RL.flatten()[valid], device),
        key_offset=first_query,
    )


class SplitAttention(ByAttentionSpan[SplitPlan]):
    """Three kinds of attention without a mask: roots over themselves, other nodes over themselves, and descendants over
    an ancestor. They are joined as in blockwise attention (Milakov & Gimelshein 2018; Dao et al. 2022). `queries` is
    one span that reaches to the end of the pack."""

    def __init__(self, tree: PrefixTree, device: torch.device, queries: Sequence[Span] | None = None):
        (first_query, _), *more = queries or tree.after(0)
        assert not more  # chosen_form refuses that
        super().__init__(tree, lambda attention_span: split_plan(tree, device, first_query, attention_span))

    def __call__(self, layer: Layer, query_BATE: Tensor, key_BJTE: Tensor, value_BJTE: Tensor) -> Tensor:
        plan = self.prepare(layer.attention_span)
        return _JoinedAttention.apply(query_BATE, key_BJTE, value_BJTE, plan, layer.scale)


class _JoinedAttention(torch.autograd.Function):
    """The join of the parts. The backward pass of each part gets the joined output and log-sum-exp, so its
    probabilities are those of the whole row, and the gradients of the parts add up."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: SplitPlan, scale: float) -> Tensor:
        joined_1ASE = torch.empty(query.shape, dtype=_wide(query.dtype), device=query.device)
        lse_1AS = joined_1ASE.new_empty(query.shape[:3])
        parts: list[Block | Bucket] = [*plan.roots, *plan.buckets]
        for part in parts:
            output, lse = _attended(part, query, key, value, scale)
            part.put(output, joined_1ASE)
            part.put(lse, lse_1AS)
        for block in plan.over:
            output, lse = _attended(block, query, key, value, scale)
            before, joined = block.rows(lse_1AS), block.rows(joined_1ASE)
            both = torch.logaddexp(before, lse)
            joined *= (before - both).exp_()[..., None]
            joined.addcmul_(output, (lse - both).exp_()[..., None])
            before.copy_(both)
        output = joined_1ASE.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse_1AS)
        ctx.plan, ctx.scale = plan, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse_1AS = ctx.saved_tensors
        gradient = gradients[0].to(query.dtype)
        sums = [torch.zeros(t.shape, dtype=_wide(t.dtype), device=t.device) for t in (query, key, value)]
        for part in (*ctx.plan.roots, *ctx.plan.over, *ctx.plan.buckets):
            found = _flash_backward(
                part.without_padding(part.rows(gradient)),
                part.rows(query),
                part.rows(key, of_keys=True),
                part.rows(value, of_keys=True),
                part.rows(output),
                part.rows(lse_1AS),
                0.0,
                part.is_causal,
                attn_mask=_in(part.bias, query),
                scale=ctx.scale,
            )
            for total, rows, of_keys in zip(sums, found, (False, True, True), strict=True):
                part.add(rows, total, of_keys=of_keys)
        d_query, d_key, d_value = (total.to(query.dtype) for total in sums)
        return d_query, d_key, d_value, None, None


def _attended(part: Block | Bucket, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute the output and log-sum-exp of a part in fp32. In bf16 each part would be rounded before the parts are
    joined, which makes the gradient of large scores (Gemma 4) worse by a fifth."""
    rows = part.rows(query), part.rows(key, of_keys=True), part.rows(value, of_keys=True)
    wide = [each.to(_wide(each.dtype)) for each in rows]
    return _flash(*wide, 0.0, part.is_causal, attn_mask=_in(part.bias, wide[0]), scale=scale)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: fp32, or fp64 for a reference."""
    return torch.promote_types(dtype, torch.float32)


def _in(bias: Tensor | None, query: Tensor) -> Tensor | None:
    """Convert a bias to the dtype of the queries, as the kernel requires."""
    return None if bias is None else bias.to(query.dtype)


class DenseAttention(ByAttentionSpan[Tensor]):
    """Attention with one dense (S, T) mask. `queries` are the spans of the tokens that have queries; None means all
    tokens."""

    def __init__(self, tree: PrefixTree, device: torch.device, queries: Sequence[Span] | None = None):
        super().__init__(tree, lambda attention_span: tree.dense_mask(device, attention_span, queries))
        self.bias = cache(self._bias)

    def __call__(self, layer: Layer, query_BASE: Tensor, key_BJTE: Tensor, value_BJTE: Tensor) -> Tensor:
        bias = self.bias(self.tree.simplest(layer.attention_span), query_BASE.dtype)
        return attended(query_BASE, key_BJTE, value_BJTE, layer, bias)

    def _bias(self, attention_span: AttentionSpan, dtype: torch.dtype) -> Tensor:
        """Convert a mask to the bias that PyTorch adds to the scores; otherwise PyTorch does so in each layer, and
        keeps the result."""
        mask_11ST = self.prepare(attention_span)
        return torch.zeros_like(mask_11ST, dtype=dtype).masked_fill(~mask_11ST, -torch.inf)
