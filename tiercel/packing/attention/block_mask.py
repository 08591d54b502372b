"""The block mask of a packed row, built from its spans. PyTorch's `create_block_mask` builds it from all pairs of
tokens, which takes 48 GB for 110,000 tokens; built from spans, the largest tensors have one number for each pair of
blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tiercel.devices import moved
from tiercel.models.layers.sight import FULL, Sight, Span
from tiercel.packing.layout import PrefixLayout

BLOCK = 128  # tokens; FlexAttention's own size
Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # batch, head, query, key


def block_mask(
    layout: PrefixLayout, device: torch.device, queries: Sequence[Span] | None = None, sight: Sight = FULL
) -> Any:
    """Build the BlockMask of a packed row. `queries` are the spans of the tokens that have queries, each except the
    last made of whole blocks; None means all tokens."""
    from torch.nn.attention.flex_attention import BlockMask

    queries = queries or layout.after(0)
    seen_4S = layout.seen_keys(sight).of(queries)
    touched, full = seen_blocks(layout, seen_4S, queries)
    partial_counts, partial_places = _ordered(moved(touched & ~full, device))
    full_counts, full_places = _ordered(moved(full, device))
    return BlockMask.from_kv_blocks(
        partial_counts,
        partial_places,
        full_counts,
        full_places,
        BLOCK_SIZE=BLOCK,
        mask_mod=_sees(seen_4S, device),
        seq_lengths=(seen_4S.shape[1], layout.length),
    )


def seen_blocks(layout: PrefixLayout, seen_4S: Tensor, queries: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Compute two tensors, bool (blocks of queries, blocks of keys): whether some query of the one block sees some key
    of the other, and whether every query sees every key. A block that the row's end cuts off never counts as fully
    seen. `seen_4S` comes from SeenKeys, for the queries."""
    count = seen_4S.shape[1]
    shape = (-(-count // BLOCK), -(-layout.length // BLOCK))
    touched, full = torch.zeros(shape, dtype=torch.bool), torch.ones(shape, dtype=torch.bool)
    if count % BLOCK:
        full[-1] = False
    seen_S4 = seen_4S.T.tolist()
    for start, stop in _pieces(layout, queries):
        block = start // BLOCK
        # Spans of later queries never start or stop earlier.
        (prompt_start, prompt_stop, own_start, own_stop), last = seen_S4[start], seen_S4[stop - 1]
        for first, end in ((prompt_start, prompt_stop), (own_start, last[3])):
            if first < end:
                touched[block, first // BLOCK : -(-end // BLOCK)] = True
        by_all = [(last[0], prompt_stop), (last[2], own_stop)]
        if by_all[0][0] < by_all[0][1] == by_all[1][0]:  # the two form one span
            by_all = [(last[0], own_stop)]
        whole = torch.zeros(shape[1], dtype=torch.bool)
        for first, end in by_all:
            whole[-(-first // BLOCK) : max(-(-first // BLOCK), end // BLOCK)] = True
        full[block] &= whole
    return touched, full


def _pieces(layout: PrefixLayout, queries: Sequence[Span]) -> Iterator[Span]:
    """Yield each run of queries that lies in one block and in one prompt or completion, counted among the queries."""
    offset = 0  # from a place in the pack to a place among the queries
    for first, end in queries:
        offset -= first
        for group in layout.groups:
            for own in (group.prompt, *group.completions):
                start, stop = max(own[0], first) + offset, min(own[1], end) + offset
                while start < stop:
                    cut = min(stop, (start // BLOCK + 1) * BLOCK)
                    yield start, cut
                    start = cut
        offset += end


def _sees(seen_4S: Tensor, device: torch.device) -> Sees:
    """Build the mask function. It closes over tensors only: a plain number would be compiled into the kernel, or would
    make PyTorch recompile when it is 0."""
    prompt_start_S, prompt_stop_S, own_start_S, own_stop_S = moved(seen_4S.to(torch.int32), device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_prompt = (key >= prompt_start_S[query]) & (key < prompt_stop_S[query])
        return in_prompt | (key >= own_start_S[query]) & (key < own_stop_S[query])

    return sees


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Count the true entries of each row, and list all places of the row with the true entries first: int32 (1, 1,
    rows) and (1, 1, rows, columns)."""
    counts = blocks.sum(-1, dtype=torch.int32)
    places = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], places[None, None].contiguous()
