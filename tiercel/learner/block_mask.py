"""The block mask of a packed row, made from its spans. PyTorch's `create_block_mask` makes it from all pairs of tokens,
which takes 48 GB for 110,000 tokens; from spans the largest tensors have a number for each pair of blocks.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tiercel.learner.layout import PrefixLayout, Span

BLOCK = 128  # tokens; FlexAttention's own size
Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # batch, head, query, key


def block_mask(layout: PrefixLayout, device: torch.device, first_query: int = 0) -> Any:
    """Make the BlockMask of a packed row. `first_query`: how many tokens at the start have keys but no queries."""
    from torch.nn.attention.flex_attention import BlockMask

    touched, full = seen_blocks(layout, first_query)
    partial_counts, partial_places = _ordered((touched & ~full).to(device, non_blocking=True))
    full_counts, full_places = _ordered(full.to(device, non_blocking=True))
    return BlockMask.from_kv_blocks(
        partial_counts,
        partial_places,
        full_counts,
        full_places,
        BLOCK_SIZE=BLOCK,
        mask_mod=_sees(layout, device, first_query),
        seq_lengths=(layout.length - first_query, layout.length),
    )


def seen_blocks(layout: PrefixLayout, first_query: int) -> tuple[Tensor, Tensor]:
    """Compute two tensors, bool (blocks of queries, blocks of keys): whether some query of a block sees some key of the
    other, and whether each query sees every key. A block that the row's end cuts is never seen whole."""
    queries = layout.length - first_query
    shape = (-(-queries // BLOCK), -(-layout.length // BLOCK))
    touched, full = torch.zeros(shape, dtype=torch.bool), torch.ones(shape, dtype=torch.bool)
    if queries % BLOCK:
        full[-1] = False
    for block, (start, stop), spans in _pieces(layout, first_query):
        whole = torch.zeros(shape[1], dtype=torch.bool)
        for first, last in spans(stop - 1):
            touched[block, first // BLOCK : -(-last // BLOCK)] = True
        for first, last in spans(start):  # what the first query sees, all of the piece see
            whole[-(-first // BLOCK) : max(-(-first // BLOCK), last // BLOCK)] = True
        full[block] &= whole
    return touched, full


def _pieces(layout: PrefixLayout, first_query: int) -> Iterator[tuple[int, Span, Callable[[int], list[Span]]]]:
    """Yield each run of queries that is in one block and in one prompt or completion: the block, the places of the run,
    and a function from a place to the spans of keys that the query there sees."""
    for group in layout.groups:
        for own in (group.prompt, *group.completions):

            def spans(place: int, own: Span = own, prompt: Span = group.prompt) -> list[Span]:
                if own == prompt:
                    return [(own[0], place + 1)]
                if prompt[1] == own[0]:  # the first completion and its prompt are one span
                    return [(prompt[0], place + 1)]
                return [prompt, (own[0], place + 1)]

            start = max(own[0], first_query)
            while start < own[1]:
                block = (start - first_query) // BLOCK
                stop = min(own[1], (block + 1) * BLOCK + first_query)
                yield block, (start, stop), spans
                start = stop


def _sees(layout: PrefixLayout, device: torch.device, first_query: int) -> Sees:
    """Make the mask function. It closes over tensors and no number: a number of its own would be compiled into the
    kernel, or would make PyTorch compile anew where it is 0. Row of each query: its place among the keys, the start
    and stop of its prompt, and the start of its prompt or completion."""
    spans = torch.tensor(
        [(*group.prompt, *own) for group in layout.groups for own in (group.prompt, *group.completions)]
    )
    spans = spans[spans[:, 2].argsort()]
    lengths = spans[:, 3] - spans[:, 2]
    rows = torch.cat([torch.arange(layout.length)[:, None], spans[:, :3].repeat_interleave(lengths, dim=0)], dim=1)
    columns = rows[first_query:].T.to(torch.int32).contiguous()
    place_S, prompt_start_S, prompt_stop_S, own_start_S = columns.to(device, non_blocking=True)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_prompt = (key >= prompt_start_S[query]) & (key < prompt_stop_S[query])
        return (key <= place_S[query]) & (in_prompt | (key >= own_start_S[query]))

    return sees


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Count the true entries of each row, and list all places of the row, those of true entries first: int32
    (1, 1, rows) and (1, 1, rows, columns)."""
    counts = blocks.sum(-1, dtype=torch.int32)
    places = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], places[None, None].contiguous()
