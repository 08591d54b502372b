"""Attention of the nodes of a prefix tree: each token attends to its node and to the node's ancestors.

`split` computes three kinds of small attentions without a mask and joins them by their log-sum-exp. Tests compare it
with the dense (T, T) mask of `PrefixTree`. The form for a GPU is in flex.py.

Shape suffixes: docs/shapes.md. Here R are the nodes of a bucket, padded to L tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tiercel.devices import moved
from tiercel.models.layers.attention import Layer, attended
from tiercel.models.layers.attention_span import FULL, AttentionSpan, Span, sequence_masks
from tiercel.packing.tree import ByAttentionSpan, PrefixTree, Visibility

PADDING_TOLERANCE = 1.25  # in a bucket the longest node has at most this many times the tokens of the shortest

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The attention of a span of queries over a span of keys."""

    queries: Span
    keys: Span
    is_causal: bool  # query i attends to keys 0..i of the span; otherwise to all keys, or as the bias says
    bias_11SK: Tensor | None = None  # fp32, -inf where a query does not see a key

    def after(self, first_query: int, device: torch.device) -> "Block":
        """Return the block on the device, with its queries counted from `first_query`."""
        queries = (self.queries[0] - first_query, self.queries[1] - first_query)
        return replace(
            self, queries=queries, bias_11SK=None if self.bias_11SK is None else moved(self.bias_11SK, device)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """The causal attention of nodes of similar length, each over itself."""

    places_RL: Tensor  # int64, place among the queries; the padding repeats the last one
    is_padding_RL: Tensor  # bool
    valid: Tensor  # int64 (M,), the entries of places_RL (flattened) that are not padding
    valid_places: Tensor  # int64 (M,), the places at these entries
    key_offset: int  # place among the keys minus place among the queries
    bias_R1LL: Tensor | None = None  # fp32, -inf where a token does not see another; None: causal


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
    visibility = tree.visibility(attention_span)
    own = [node for node in tree.nodes if node.span[0] >= first_query]
    roots = [_over_itself(tree, node.span, attention_span) for node in own if node.parent is None]
    others = [node.span for node in own if node.parent is not None]
    over = [
        block for number in range(len(tree.nodes)) for block in _over_ancestor(tree, number, attention_span, visibility)
    ]
    return SplitPlan(
        roots=tuple(block.after(first_query, device) for block in roots),
        buckets=tuple(_own_bucket(tree, spans, attention_span, first_query, device) for spans in similar(others)),
        over=tuple(block.after(first_query, device) for block in over),
    )


def _over_itself(tree: PrefixTree, own: Span, attention_span: AttentionSpan) -> Block:
    length, picture_spans = own[1] - own[0], tree.picture_spans_in(own)
    attention_span = attention_span.within(length, picture_spans)
    if attention_span.is_causal:
        return Block(queries=own, keys=own, is_causal=True)
    bias_11PP = _bias(sequence_masks(attention_span, length, [picture_spans]))
    return Block(queries=own, keys=own, is_causal=False, bias_11SK=bias_11PP)


def _over_ancestor(tree: PrefixTree, number: int, attention_span: AttentionSpan, visibility: Visibility) -> list[Block]:
    """Build the attention of a node's descendants over the node: one block for all of them, or, if a window limits what
    they see, one for each, because a query that saw no key would have no log-sum-exp."""
    (start, stop), subtree_stop = tree.nodes[number].span, tree.stops[number]
    if stop == subtree_stop:
        return []
    depth_T = visibility.depth_T
    if (
        attention_span.window is None
        or int(depth_T[stop:subtree_stop].max()) - int(depth_T[start]) < attention_span.window
    ):
        return [Block(queries=(stop, subtree_stop), keys=(start, stop), is_causal=False)]
    reach, last = attention_span.window - 1, int(depth_T[stop - 1])  # a token sees so many tokens before itself
    blocks = []
    for node, depth in zip(tree.nodes, tree.depths, strict=True):
        if stop <= node.span[0] < subtree_stop:
            queries = (node.span[0], min(node.span[1], node.span[0] + reach - (depth - last) + 1))
            keys = (max(start, stop - (reach - (depth - last) + 1)), stop)
            if queries[0] < queries[1]:
                distance_SK = depth_T[slice(*queries), None] - depth_T[slice(*keys)]
                bias_11SK = _bias(distance_SK <= reach)[None, None]
                blocks.append(Block(queries=queries, keys=keys, is_causal=False, bias_11SK=bias_11SK))
    return blocks


def _own_bucket(
    tree: PrefixTree, spans: Sequence[Span], attention_span: AttentionSpan, first_query: int, device: torch.device
) -> Bucket:
    picture_spans = [tree.picture_spans_in(span) for span in spans]
    length = spans[-1][1] - spans[-1][0]
    attention_span = attention_span.within(length, [pair for of_row in picture_spans for pair in of_row])
    moved_spans = [(start - first_query, stop - first_query) for start, stop in spans]
    bucket = bucket_of(moved_spans, first_query, device)
    if attention_span.is_causal:
        return bucket
    return replace(bucket, bias_R1LL=moved(_bias(sequence_masks(attention_span, length, picture_spans)), device))


def _bias(sees: Tensor) -> Tensor:
    return torch.zeros(sees.shape).masked_fill(~sees, -torch.inf)


def similar(spans: Sequence[Span]) -> list[list[Span]]:
    """Sort spans by length, and start a new bucket when PADDING_TOLERANCE would be exceeded."""
    groups: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span[1] - span[0], span)):
        length = span[1] - span[0]
        if not groups or length > PADDING_TOLERANCE * (groups[-1][0][1] - groups[-1][0][0]):
            groups.append([])
        groups[-1].append(span)
    return groups


def bucket_of(spans: Sequence[Span], key_offset: int, device: torch.device) -> Bucket:
    """Place spans of similar length, sorted by length, side by side."""
    width = spans[-1][1] - spans[-1][0]
    starts_R = torch.tensor([span[0] for span in spans])
    lengths_R = torch.tensor([span[1] - span[0] for span in spans])
    order_L = torch.arange(width)
    places_RL = starts_R[:, None] + torch.minimum(order_L, lengths_R[:, None] - 1)
    is_padding_RL = order_L >= lengths_R[:, None]
    valid = (~is_padding_RL).flatten().nonzero()[:, 0]
    return Bucket(
        places_RL=moved(places_RL, device),
        is_padding_RL=moved(is_padding_RL, device),
        valid=moved(valid, device),
        valid_places=moved(places_RL.flatten()[valid], device),
        key_offset=key_offset,
    )


class SplitAttention:
    """Three kinds of attention without a mask: roots over themselves, other nodes over themselves, and descendants over
    an ancestor. They are joined as in blockwise attention (Milakov & Gimelshein 2018; Dao et al. 2022). `queries` is
    one span that reaches to the end of the pack."""

    def __init__(self, tree: PrefixTree, device: torch.device, queries: Sequence[Span] | None = None):
        (first_query, _), *more = queries or tree.after(0)
        assert not more  # chosen_form refuses that
        self.plans = ByAttentionSpan(tree, lambda attention_span: split_plan(tree, device, first_query, attention_span))

    def prepare(self, attention_span: AttentionSpan) -> None:
        self.plans.of(attention_span)

    def __call__(self, layer: Layer, query_BATE: Tensor, key_BJTE: Tensor, value_BJTE: Tensor) -> Tensor:
        return _JoinedAttention.apply(
            query_BATE, key_BJTE, value_BJTE, self.plans.of(layer.attention_span), layer.scale
        )


class _JoinedAttention(torch.autograd.Function):
    """The join of the parts. The backward pass of each part gets the joined output and log-sum-exp, so its
    probabilities are those of the whole row, and the gradients of the parts add up."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: SplitPlan, scale: float) -> Tensor:
        joined_ASE = torch.empty(query.shape[1:], dtype=_wide(query.dtype), device=query.device)
        lse_AS = torch.empty(query.shape[1:3], dtype=_wide(query.dtype), device=query.device)
        for block in plan.roots:
            queries = slice(*block.queries)
            output, lse = _over(block, query, key, value, scale)
            joined_ASE[:, queries], lse_AS[:, queries] = output, lse
        for bucket in plan.buckets:
            output, lse = _part(_gathered(bucket, query, key, value), bucket.bias_R1LL, bucket.bias_R1LL is None, scale)
            places = bucket.valid_places
            joined_ASE[:, places] = _flat(output)[:, bucket.valid]
            lse_AS[:, places] = _flat(lse)[:, bucket.valid]
        for block in plan.over:
            queries = slice(*block.queries)
            output, lse = _over(block, query, key, value, scale)
            both = torch.logaddexp(lse_AS[:, queries], lse)
            joined_ASE[:, queries] *= (lse_AS[:, queries] - both).exp_()[..., None]
            joined_ASE[:, queries].addcmul_(output, (lse - both).exp_()[..., None])
            lse_AS[:, queries] = both
        output = joined_ASE[None].to(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse_AS)
        ctx.plan, ctx.scale = plan, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse_AS = ctx.saved_tensors
        gradient = gradients[0].to(query.dtype)
        sums = [torch.zeros(t.shape[1:], dtype=_wide(t.dtype), device=t.device) for t in (query, key, value)]
        for block in (*ctx.plan.roots, *ctx.plan.over):
            queries, keys = slice(*block.queries), slice(*block.keys)
            parts = _flash_backward(
                gradient[:, :, queries],
                query[:, :, queries],
                key[:, :, keys],
                value[:, :, keys],
                output[:, :, queries],
                lse_AS[None, :, queries],
                0.0,
                block.is_causal,
                attn_mask=_in(block.bias_11SK, query),
                scale=ctx.scale,
            )
            for total, part, places in zip(sums, parts, (queries, keys, keys), strict=True):
                total[:, places].add_(part[0])  # `+=` would make another copy of the sum
        for bucket in ctx.plan.buckets:
            rows = _gathered(bucket, query, key, value)
            rows_gradient, rows_output = _rows(gradient[0], bucket.places_RL), _rows(output[0], bucket.places_RL)
            rows_lse = lse_AS[:, bucket.places_RL].transpose(0, 1)
            # A padded place repeats a real one; its gradient must not be counted twice.
            rows_gradient = rows_gradient.masked_fill(bucket.is_padding_RL[:, None, :, None], 0.0)
            bias = _in(bucket.bias_R1LL, query)
            parts = _flash_backward(
                rows_gradient, *rows, rows_output, rows_lse, 0.0, bias is None, attn_mask=bias, scale=ctx.scale
            )
            offsets = (0, bucket.key_offset, bucket.key_offset)
            for total, part, offset in zip(sums, parts, offsets, strict=True):
                total[:, bucket.valid_places + offset] += _flat(part)[:, bucket.valid]
        d_query, d_key, d_value = (total[None].to(query.dtype) for total in sums)
        return d_query, d_key, d_value, None, None


def _over(block: Block, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute a block's output (A, S, E) and log-sum-exp (A, S)."""
    queries, keys = slice(*block.queries), slice(*block.keys)
    rows = query[:, :, queries], key[:, :, keys], value[:, :, keys]
    output, lse = _part(rows, block.bias_11SK, block.is_causal, scale)
    return output[0], lse[0]


def _part(
    rows: tuple[Tensor, Tensor, Tensor], bias: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the output and log-sum-exp of a part in fp32. In bf16 each part would be rounded before the parts are
    joined, which makes the gradient of large scores (Gemma 4) worse by a fifth."""
    query, key, value = (each.to(_wide(each.dtype)) for each in rows)
    return _flash(query, key, value, 0.0, is_causal, attn_mask=_in(bias, query), scale=scale)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: fp32, or fp64 for a reference."""
    return torch.promote_types(dtype, torch.float32)


def _in(bias: Tensor | None, query: Tensor) -> Tensor | None:
    """Convert a bias to the dtype of the queries, as the kernel requires."""
    return None if bias is None else bias.to(query.dtype)


def _rows(tensor_ATE: Tensor, places_RL: Tensor) -> Tensor:
    """Gather the rows (R, A, L, E) of a bucket."""
    return tensor_ATE[:, places_RL].transpose(0, 1)


def _gathered(bucket: Bucket, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    key_places_RL = bucket.places_RL + bucket.key_offset
    return _rows(query[0], bucket.places_RL), _rows(key[0], key_places_RL), _rows(value[0], key_places_RL)


def _flat(tensor_RAL: Tensor) -> Tensor:
    """Reshape (R, A, L, ...) to (A, R * L, ...)."""
    return tensor_RAL.transpose(0, 1).flatten(1, 2)


class DenseAttention:
    """Attention with one dense (S, T) mask. `queries` are the spans of the tokens that have queries; None means all
    tokens."""

    def __init__(self, tree: PrefixTree, device: torch.device, queries: Sequence[Span] | None = None):
        self.masks_11ST = ByAttentionSpan(tree, lambda attention_span: tree.dense_mask(device, attention_span, queries))
        self.biases = cache(
            lambda dtype: ByAttentionSpan(tree, lambda attention_span: self._bias(attention_span, dtype))
        )

    def prepare(self, attention_span: AttentionSpan) -> None:
        self.masks_11ST.of(attention_span)

    def __call__(self, layer: Layer, query_BASE: Tensor, key_BJTE: Tensor, value_BJTE: Tensor) -> Tensor:
        bias = self.biases(query_BASE.dtype).of(layer.attention_span)
        return attended(query_BASE, key_BJTE, value_BJTE, layer, bias)

    def _bias(self, attention_span: AttentionSpan, dtype: torch.dtype) -> Tensor:
        """Convert a mask to the bias that PyTorch adds to the scores; otherwise PyTorch does so in each layer, and
        keeps the result."""
        mask_11ST = self.masks_11ST.of(attention_span)
        return torch.zeros_like(mask_11ST, dtype=dtype).masked_fill(~mask_11ST, -torch.inf)
