"""Fewer prompts than ranks: which rank samples what, and which parts are learnt where."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.packing.items import learnable_groups, prompt, scored_group
from tiercel.distributed.ranks import ALONE, Ranks
from tiercel.training.grpo.group_sharding import (
    GroupSlice,
    even_ranges,
    group_parts,
    sample_on_all_ranks,
    split_across_ranks,
)
from tiercel.types import Completion, Group


def portion(owner: int, place: int, rank: int, *numbers: int) -> GroupSlice:
    return GroupSlice(owner=owner, place=place, rank=rank, numbers=range(*numbers))


def test_each_prompts_completions_are_drawn_by_its_share_of_the_ranks():
    # `rank_slice` gives the two prompts of five ranks to ranks 2 and 4; 8 completions over 3 and over 2 ranks
    assert group_parts([0, 0, 1, 0, 1], 8) == [
        portion(2, 0, 2, 0, 2),
        portion(2, 0, 1, 2, 5),
        portion(2, 0, 0, 5, 8),
        portion(4, 0, 4, 0, 4),
        portion(4, 0, 3, 4, 8),
    ]


def test_two_prompts_of_one_rank_go_to_two_halves():
    assert group_parts([2, 0, 0, 0], 2) == [
        portion(0, 0, 1, 0, 1),
        portion(0, 0, 0, 1, 2),
        portion(0, 1, 3, 0, 1),
        portion(0, 1, 2, 1, 2),
    ]


@pytest.mark.parametrize("group_size", (2, 3, 8, 16))
@pytest.mark.parametrize("ranks", (2, 3, 5, 8, 16))
def test_every_completion_is_drawn_once_and_no_rank_draws_twice(ranks, group_size):
    for prompts in range(1, ranks):
        counts = [ranks_prompts(prompts, rank, ranks) for rank in range(ranks)]
        shares = group_parts(counts, group_size)
        drawn = sorted((each.owner, each.place, number) for each in shares for number in each.numbers)
        homes = [(rank, place) for rank, count in enumerate(counts) for place in range(count)]
        assert drawn == [(*home, number) for home in homes for number in range(group_size)]
        assert (
            len({each.rank for each in shares}) == len(shares) == min(ranks, sum_of_shares(ranks, prompts, group_size))
        )


def ranks_prompts(prompts: int, rank: int, ranks: int) -> int:
    return prompts * (rank + 1) // ranks - prompts * rank // ranks


def sum_of_shares(ranks: int, prompts: int, group_size: int) -> int:
    """No prompt has more group_parts than completions."""
    bounds = [-(-ranks * number // prompts) for number in range(prompts + 1)]
    return sum(min(group_size, end - start) for start, end in pairwise(bounds))


def test_even_ranges_differ_by_one_at_most():
    assert even_ranges(8, 3) == [range(0, 2), range(2, 5), range(5, 8)]
    assert even_ranges(2, 5) == [range(0, 1), range(1, 2)]


class Four(Ranks):
    """One rank of four, of which the others have nothing."""

    def all_gather(self, value):
        return [value, [] if isinstance(value, list) else 0, 0, 0]


def test_the_only_group_of_four_ranks_is_cut_in_four():
    (group,) = learnable_groups([scored_group(prompt([1, 2]), [([3, 4], 0.0), ([5], 1.0), ([6], 2.0), ([7, 8], 4.0)])])
    parts = split_across_ranks(Four(rank=0, world_size=4), [group], data_parallel_size=4)
    assert [part.advantages_G.tolist() for part in parts] == [[value] for value in group.advantages_G.tolist()]
    assert all(part.item.prompt is group.item.prompt for part in parts)
    assert split_across_ranks(ALONE, [group], data_parallel_size=1) == [group]


class LastOfTwo(Ranks):
    """The rank that has the only prompt. The other one samples what it is sent."""

    def all_gather(self, value):
        return [0, value]

    def run_on_all(self, action):
        return action()

    def send(self, moves, payloads):
        if moves == [(1, 1), (1, 0)]:  # the prompt is sent out
            return {0: payloads[0]}
        assert moves == [(1, 1), (0, 1)]  # completions are sent back
        return {0: payloads[0], 1: replace(payloads[0], completions=completions(range(2, 4)))}


def completions(numbers: range) -> tuple[Completion, ...]:
    return tuple(
        Completion(
            token_ids_L=torch.tensor([number]), logprobs_L=torch.zeros(1), text="", is_truncated=False, seed=number
        )
        for number in numbers
    )


def test_a_rank_draws_its_portion_and_gets_the_group_whole():
    asked = []

    def draw(prompts, numbers):
        asked.append((len(prompts), numbers))
        return tuple(Group(prompt=each, completions=completions(numbers), policy_version=7) for each in prompts)

    only = prompt([1, 2])
    (group,) = sample_on_all_ranks(LastOfTwo(rank=1, world_size=2), [only], 4, draw)
    assert asked == [(1, range(0, 2))]
    assert [completion.seed for completion in group.completions] == [0, 1, 2, 3]
    assert group.prompt is only and group.policy_version == 7
