"""Attention of packed rows `[P1 | c11 .. c1G | P2 | ..]`: each prompt is computed once, and each completion attends to
its prompt and to itself.

`split` computes three kinds of small attentions without a mask and joins them by their log-sum-exp. Tests compare it
with the dense (T, T) mask of `PrefixLayout`. The form for a GPU is in flex.py.

Shape suffixes: docs/shapes.md. Here R are the completions of a bucket, padded to L tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tiercel.learner.layout import PrefixLayout, Span
from tiercel.models.images import moved

PADDING_TOLERANCE = 1.25  # in a bucket the longest completion has at most this many times the tokens of the shortest

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Describes an attention of a span of queries over a span of keys."""

    queries: Span
    keys: Span
    is_causal: bool  # query i attends to keys 0..i of the span; otherwise to all


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Describes a causal attention of completions of similar length, each over itself."""

    places_RL: Tensor  # int64, place among the queries; the padding repeats the last one
    is_padding_RL: Tensor  # bool
    valid: Tensor  # int64 (M,), the entries of places_RL (flattened) that are not padding
    valid_places: Tensor  # int64 (M,), the places at these entries
    key_offset: int  # place among the keys minus place among the queries


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitPlan:
    """Lists what to compute: first the blocks, then the buckets, which are joined to the results of the blocks."""

    blocks: tuple[Block, ...]
    buckets: tuple[Bucket, ...]


def split_plan(layout: PrefixLayout, device: torch.device, first_query: int = 0) -> SplitPlan:
    """Plan the attention of a packed row. `first_query`: how many tokens at the start have keys but no queries."""
    blocks: list[Block] = []
    completions: list[Span] = []
    for group in layout.groups:
        if group.prompt[0] >= first_query:
            span = (group.prompt[0] - first_query, group.prompt[1] - first_query)
            blocks.append(Block(queries=span, keys=group.prompt, is_causal=True))
        if group.completions:
            start, stop = group.completions[0][0], group.completions[-1][1]
            queries = (start - first_query, stop - first_query)
            blocks.append(Block(queries=queries, keys=group.prompt, is_causal=False))
        completions += [(start - first_query, stop - first_query) for start, stop in group.completions]
    buckets = tuple(bucket_of(spans, first_query, device) for spans in similar(completions))
    return SplitPlan(blocks=tuple(blocks), buckets=buckets)


def similar(spans: Sequence[Span]) -> list[list[Span]]:
    """Sort spans by length and start a new bucket where PADDING_TOLERANCE would be exceeded."""
    groups: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span[1] - span[0], span)):
        length = span[1] - span[0]
        if not groups or length > PADDING_TOLERANCE * (groups[-1][0][1] - groups[-1][0][0]):
            groups.append([])
        groups[-1].append(span)
    return groups


def bucket_of(spans: Sequence[Span], key_offset: int, device: torch.device) -> Bucket:
    """Put spans of similar length, sorted by length, side by side."""
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
    """Computes three kinds of attention without a mask: prompts over themselves, completions over their prompt, and
    completions over themselves. The last two are joined as in blockwise attention (Milakov & Gimelshein 2018; Dao et
    al. 2022)."""

    def __init__(self, layout: PrefixLayout, device: torch.device, first_query: int = 0):
        self.plan = split_plan(layout, device, first_query)

    def __call__(self, layer: int, query_BATE: Tensor, key_BJTE: Tensor, value_BJTE: Tensor, scale: float) -> Tensor:
        return _Joined.apply(query_BATE, key_BJTE, value_BJTE, self.plan, scale)


class _Joined(torch.autograd.Function):
    """Joins the parts. The backward pass of each part gets the joined output and log-sum-exp, so its probabilities are
    those of the whole row, and the gradients of the parts are added."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: SplitPlan, scale: float) -> Tensor:
        joined_ASE = torch.empty(query.shape[1:], dtype=torch.float32, device=query.device)
        lse_AS = torch.empty(query.shape[1:3], dtype=torch.float32, device=query.device)
        for block in plan.blocks:
            queries, keys = slice(*block.queries), slice(*block.keys)
            output, lse = _flash(
                query[:, :, queries], key[:, :, keys], value[:, :, keys], 0.0, block.is_causal, scale=scale
            )
            joined_ASE[:, queries], lse_AS[:, queries] = output[0], lse[0]
        for bucket in plan.buckets:
            output, lse = _flash(*_gathered(bucket, query, key, value), 0.0, True, scale=scale)
            places = bucket.valid_places
            own_AME, own_AM = _flat(output)[:, bucket.valid].float(), _flat(lse)[:, bucket.valid]
            prompt_AM = lse_AS[:, places]
            both_AM = torch.logaddexp(own_AM, prompt_AM)
            prompt_AME = joined_ASE[:, places] * (prompt_AM - both_AM).exp()[..., None]
            joined_ASE[:, places] = prompt_AME + own_AME * (own_AM - both_AM).exp()[..., None]
            lse_AS[:, places] = both_AM
        output = joined_ASE[None].to(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse_AS)
        ctx.plan, ctx.scale = plan, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse_AS = ctx.saved_tensors
        gradient = gradients[0].to(query.dtype)
        sums = [torch.zeros(t.shape[1:], dtype=torch.float32, device=t.device) for t in (query, key, value)]
        for block in ctx.plan.blocks:
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
                scale=ctx.scale,
            )
            for total, part, places in zip(sums, parts, (queries, keys, keys), strict=True):
                total[:, places].add_(part[0])  # `+=` would copy the sum once more
        for bucket in ctx.plan.buckets:
            rows = _gathered(bucket, query, key, value)
            rows_gradient, rows_output = _rows(gradient[0], bucket.places_RL), _rows(output[0], bucket.places_RL)
            rows_lse = lse_AS[:, bucket.places_RL].transpose(0, 1)
            # A padded place repeats a real one; its gradient must not be counted twice.
            rows_gradient = rows_gradient.masked_fill(bucket.is_padding_RL[:, None, :, None], 0.0)
            parts = _flash_backward(rows_gradient, *rows, rows_output, rows_lse, 0.0, True, scale=ctx.scale)
            offsets = (0, bucket.key_offset, bucket.key_offset)
            for total, part, offset in zip(sums, parts, offsets, strict=True):
                total[:, bucket.valid_places + offset] += _flat(part)[:, bucket.valid]
        d_query, d_key, d_value = (total[None].to(query.dtype) for total in sums)
        return d_query, d_key, d_value, None, None


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
    """Computes attention with one dense (T, T) mask."""

    def __init__(self, layout: PrefixLayout, device: torch.device, first_query: int = 0):
        self.mask_11ST = layout.dense_mask(device)[:, :, first_query:]

    def __call__(self, layer: int, query_BATE: Tensor, key_BJTE: Tensor, value_BJTE: Tensor, scale: float) -> Tensor:
        mask = self.mask_11ST
        return scaled_dot_product_attention(query_BATE, key_BJTE, value_BJTE, mask, scale=scale, enable_gqa=True)
