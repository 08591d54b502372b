"""Moves that balance the tokens of ranks."""

import random

import pytest

from tiercel.distributed.balance import TOLERANCE, Move, balancing_moves


def after(costs: list[list[int]]) -> list[list[int]]:
    """The ranks' costs once the moves are made."""
    moves = balancing_moves(costs)
    gone = {(move.sender, move.item) for move in moves}
    held = [[c for i, c in enumerate(own) if (rank, i) not in gone] for rank, own in enumerate(costs)]
    for move in moves:
        held[move.receiver].append(costs[move.sender][move.item])
    return held


@pytest.mark.parametrize(
    ("costs", "moves"),
    (
        ([[5]], []),
        ([[], []], []),
        ([[10], [10]], []),
        ([[100], [103]], []),  # nearly equal
        ([[6, 4], []], [Move(item=1, sender=0, receiver=1)]),  # the one closer to half of the gap
        ([[9, 1], [2]], [Move(item=1, sender=0, receiver=1)]),
        ([[10], []], []),  # one item fills a rank
    ),
)
def test_moves_by_hand(costs, moves):
    assert balancing_moves(costs) == moves


def test_ranks_that_compute_together_count_as_one():
    """Ranks 0 and 1 hold 12 and 1, ranks 2 and 3 nothing: the 7 of rank 0 goes to the first of the others."""
    moves = balancing_moves([[7, 5], [1], [], []], together=2)
    assert moves == [Move(item=0, sender=0, receiver=2)]
    assert balancing_moves([[7, 5], []], together=2) == []


def test_any_costs_end_balanced_and_nothing_is_lost():
    draws = random.Random(0)
    for _ in range(200):
        costs = [[draws.randint(1, 1000) for _ in range(draws.randint(0, 8))] for _ in range(draws.randint(1, 6))]
        held = after(costs)
        assert sorted(c for own in held for c in own) == sorted(c for own in costs for c in own)
        loads = [sum(own) for own in held]
        assert max(loads) <= max(sum(own) for own in costs)
        fullest = held[loads.index(max(loads))]
        gap = max(loads) - min(loads)
        assert gap <= TOLERANCE * sum(loads) / len(loads) or all(cost >= gap for cost in fullest)


def test_equal_shares_stay_at_home():
    assert balancing_moves([[7, 3, 5], [5, 7, 3], [3, 5, 7]]) == []
