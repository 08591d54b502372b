"""Which tokens of a pack each rank computes. What ranks compute together is tested in
tests/distributed/test_context.py."""

import pytest
import torch

from tiercel.distributed.context import ContextGroup
from tiercel.packing.context_parallel import Part, part_of
from tiercel.packing.layout import PackedTokens
from tiercel.packing.tree import groups_tree


def packed(length: int, scoring: list[int]) -> PackedTokens:
    scored = torch.tensor(scoring, dtype=torch.int64)
    return PackedTokens(
        tree=groups_tree((length - 1, 1)),
        token_ids_T=100 + torch.arange(length),
        positions_DT=torch.arange(length)[None],
        images=(),
        image_nodes=(),
        ends_C=(1,),
        repeated_length=length,
        scoring_N=scored,
        targets_N=scored,
        continuation_of_N=scored,
    )


def parts(batch: PackedTokens, size: int, multiple: int = 1) -> list[Part]:
    return [part_of(batch, ContextGroup(place=place, size=size, processes=None), multiple) for place in range(size)]


def test_parts_by_hand():
    """Ten tokens on two ranks: chunks of three, the last filled with two; rank 0 has the first and the last."""
    batch = packed(10, scoring=[1, 9, 3, 8, 6])
    first, second = parts(batch, 2)
    assert (first.spans, second.spans) == (((0, 3), (9, 12)), ((3, 6), (6, 9)))
    assert first.tree.length == second.tree.length == 12
    assert first.of(batch.token_ids_T).tolist() == [100, 101, 102, 109, 0, 0]
    assert second.of(batch.positions_DT).tolist() == [[3, 4, 5, 6, 7, 8]]
    assert first.scored_M.tolist() == [0, 1] and second.scored_M.tolist() == [2, 3, 4]
    assert first.states_M.tolist() == [1, 3] and second.states_M.tolist() == [0, 5, 3]
    assert first.counts == second.counts == (2, 3)
    assert first.order_N.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("multiple", (1, 8))
@pytest.mark.parametrize("size", (2, 3, 4))
@pytest.mark.parametrize("length", (2, 7, 50))
def test_every_token_has_one_rank_and_scores_come_back_in_order(length, size, multiple):
    generator = torch.Generator().manual_seed(length)
    batch = packed(length, scoring=torch.randperm(length, generator=generator)[: length // 2].tolist())
    found = parts(batch, size, multiple)
    chunks = sorted(span for part in found for span in part.spans)
    assert [start for start, _ in chunks] == [0, *(stop for _, stop in chunks[:-1])] and chunks[-1][1] >= length
    assert all((stop - start) % multiple == 0 for start, stop in chunks)
    own = [part.of(batch.token_ids_T)[part.states_M] for part in found]
    joined = torch.cat(own)[found[0].order_N]
    assert torch.equal(joined, batch.token_ids_T[batch.scoring_N])
