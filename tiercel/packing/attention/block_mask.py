"""The block mask of a packed row, built from its nodes. PyTorch's `create_block_mask` builds it from all pairs of
tokens, which takes 48 GB for 110,000 tokens; built from nodes, the largest tensors have about one number for each pair
of blocks. Shape suffixes: docs/shapes.md.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tiercel.devices import moved
from tiercel.models.layers.attention_span import FULL, AttentionSpan, Span
from tiercel.packing.tree import PrefixTree

BLOCK = 128  # tokens; FlexAttention's own size
Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # batch, head, query, key


def block_mask(
    tree: PrefixTree, device: torch.device, queries: Sequence[Span] | None = None, attention_span: AttentionSpan = FULL
) -> Any:
    """Build the BlockMask of a packed row. `queries` are the spans of the tokens that have queries, each except the
    last made of whole blocks; None means all tokens."""
    from torch.nn.attention.flex_attention import BlockMask

    visibility = tree.visibility(attention_span)
    queries_3S, keys_2T = visibility.of_queries(queries or tree.after(0)), visibility.keys_2T
    touched, full = seen_blocks(tree, queries_3S, keys_2T)
    partial_counts, partial_places = _ordered(moved(touched & ~full, device))
    full_counts, full_places = _ordered(moved(full, device))
    return BlockMask.from_kv_blocks(
        partial_counts,
        partial_places,
        full_counts,
        full_places,
        BLOCK_SIZE=BLOCK,
        mask_mod=_sees(queries_3S, keys_2T, device),
        seq_lengths=(queries_3S.shape[1], tree.length),
    )


def seen_blocks(tree: PrefixTree, queries_3S: Tensor, keys_2T: Tensor) -> tuple[Tensor, Tensor]:
    """Compute two tensors, bool (blocks of queries, blocks of keys): whether some query of the one block sees some key
    of the other, and whether every query sees every key. A block that the row's end cuts off never counts as fully
    seen. The queries and keys are those of Visibility."""
    place_S, until_S, reach_S = queries_3S
    stop_T, depth_T = keys_2T
    order_T = torch.arange(tree.length)
    # Within a piece of a node, later queries see no fewer later keys and no more earlier ones.
    query, last_query = _pieces(tree, place_S)
    key, last_key = _pieces(tree, order_T)
    some = (key < until_S[last_query, None]) & (place_S[query, None] < stop_T[key])
    some &= reach_S[query, None] <= depth_T[last_key]
    every = (last_key < until_S[query, None]) & (place_S[last_query, None] < stop_T[key])
    every &= reach_S[last_query, None] <= depth_T[key]
    shape = (-(-len(place_S) // BLOCK), -(-tree.length // BLOCK))
    blocks = query[:, None] // BLOCK, (key // BLOCK)[None]
    touched = torch.zeros(shape).index_put_(blocks, some.float(), accumulate=True) > 0
    full = torch.zeros(shape).index_put_(blocks, (~every).float(), accumulate=True) == 0
    if len(place_S) % BLOCK:
        full[-1] = False
    if tree.length % BLOCK:
        full[:, -1] = False
    return touched, full


def _pieces(tree: PrefixTree, place_S: Tensor) -> tuple[Tensor, Tensor]:
    """Cut tokens, given by their places, into runs that lie in one block and in one node. Return the first and the last
    token of each, counted among the given ones."""
    starts = torch.tensor([node.span[0] for node in tree.nodes])
    node_S = torch.bucketize(place_S, starts, right=True)
    is_first_S = (torch.arange(len(place_S)) % BLOCK == 0) | (place_S != place_S.roll(1) + 1)
    first = (is_first_S | (node_S != node_S.roll(1))).nonzero()[:, 0]
    return first, torch.cat([first[1:], torch.tensor([len(place_S)])]) - 1


def _sees(queries_3S: Tensor, keys_2T: Tensor, device: torch.device) -> Sees:
    """Build the mask function. It closes over tensors only: a plain number would be compiled into the kernel, or would
    make PyTorch recompile when it is 0."""
    place_S, until_S, first_S = moved(queries_3S.to(torch.int32), device)
    stop_T, depth_T = moved(keys_2T.to(torch.int32), device)

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_before = (key < until_S[query]) & (first_S[query] <= depth_T[key])
        return is_before & (place_S[query] < stop_T[key])

    return sees


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Count the true entries of each row, and list all places of the row with the true entries first: int32 (1, 1,
    rows) and (1, 1, rows, columns)."""
    counts = blocks.sum(-1, dtype=torch.int32)
    places = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], places[None, None].contiguous()
