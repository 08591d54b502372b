"""Cuts of trees that do not fit into a microbatch."""

import random

import pytest

from tiercel.packing.cutting import Bin, TreeCutter, prefix_cuts, together
from tiercel.packing.tree import PrefixTree, end_to_end, groups_tree


def tree_of(*nodes: tuple[int, int | None]) -> PrefixTree:
    """Build a tree from the length and the parent of each node."""
    return PrefixTree(nodes=end_to_end(*zip(*nodes, strict=True)))


# A picture of 10 tokens with two questions of 2 tokens; three answers of 3 tokens to the first, two to the second.
PICTURE = tree_of((10, None), (2, 0), (3, 1), (3, 1), (3, 1), (2, 0), (3, 5), (3, 5))
ENDS = [2, 3, 4, 6, 7]


def runs(budget: int, tree: PrefixTree = PICTURE, ends: list[int] = ENDS) -> list[list[Bin]]:
    return together(TreeCutter(tree, [(end,) for end in ends], budget).bins())


def test_a_tree_that_fits_is_one_bin():
    assert runs(29) == [[Bin((0, 1, 2, 3, 4))]]


def test_a_tree_is_cut_between_its_questions():
    (found,) = runs(28)
    assert found == [Bin((0, 1, 2), (0,)), Bin((3, 4), (0,))] and list(prefix_cuts(found)) == [((0,), 0, 2)]


def test_a_question_that_does_not_fit_after_its_picture_is_cut_below_itself():
    (found,) = runs(18)
    assert found == [Bin((0, 1), (0, 1)), Bin((2,), (0, 1)), Bin((3, 4), (0,))]
    assert list(prefix_cuts(found)) == [((0,), 0, 3), ((0, 1), 0, 2)]


def test_roots_that_fit_share_a_bin_around_one_that_does_not():
    tree = tree_of((2, None), (3, None), (4, 1), (4, 1), (2, None), (2, None))
    found = runs(8, tree, [0, 2, 3, 4, 5])
    assert found == [[Bin((0,))], [Bin((1,), (1,)), Bin((2,), (1,))], [Bin((3, 4))]]
    assert [list(prefix_cuts(each)) for each in found] == [[], [((1,), 0, 2)], []]


def test_a_row_that_others_continue_goes_with_the_first_of_them():
    tree = tree_of((4, None), (3, 0), (3, 0))
    assert runs(7, tree, [1, 0, 2]) == [[Bin((0, 1), (0,)), Bin((2,), (0,))]]


def test_a_row_that_others_continue_goes_below_the_first_cut():
    tree = tree_of((4, None), (3, 0), (3, 1), (3, 1))  # one row ends with the root, the others with the leaves
    (found,) = runs(10, tree, [0, 2, 3])
    assert found == [Bin((0, 1), (0, 1)), Bin((2,), (0, 1))]
    assert list(prefix_cuts(found)) == [((0,), 0, 2), ((0, 1), 0, 2)]


def test_two_roots_that_do_not_fit_run_one_after_the_other():
    tree = groups_tree((2, 3, 3), (2, 3, 3))
    assert runs(5, tree, [1, 2, 4, 5]) == [[Bin((0,), (0,)), Bin((1,), (0,))], [Bin((2,), (3,)), Bin((3,), (3,))]]


def test_the_answers_of_a_pair_stay_together():
    """Three pairs after a picture of 10: of one question of 2, of two questions, and of one that ends with another."""
    tree = tree_of((10, None), (2, 0), (3, 1), (3, 1), (2, 0), (3, 4), (1, 5))
    pairs = [(2, 3), (3, 6), (5, 6)]
    assert list(TreeCutter(tree, pairs, 21).bins()) == [Bin((0,), (0,)), Bin((1, 2), (0,))]
    assert list(TreeCutter(tree, pairs, 24).bins()) == [Bin((0, 1, 2))]


def test_bins_of_entries_that_share_nothing_are_filled_in_order():
    tree = groups_tree((5,), (5,), (10,), (2,))
    for budget, expected in ((10, [(0, 1), (2,), (3,)]), (12, [(0, 1), (2, 3)]), (22, [(0, 1, 2, 3)])):
        assert runs(budget, tree, [0, 1, 2, 3]) == [[Bin(entries)] for entries in expected]
    assert runs(10, groups_tree(), []) == []


@pytest.mark.parametrize("answers", (1, 2))
@pytest.mark.parametrize("seed", range(20))
def test_every_entry_is_in_one_bin_that_fits(seed, answers):
    dice = random.Random(seed)
    nodes: list[tuple[int, int | None]] = []

    def grow(parent: int | None, levels: int) -> None:
        number = len(nodes)
        nodes.append((dice.randint(1, 9), parent))
        for _ in range(dice.randint(0, 3) if levels else 0):
            grow(number, levels - 1)

    for _ in range(3):
        grow(None, 4)
    tree = tree_of(*nodes)
    wanted = [number for number in range(len(nodes)) if dice.random() < 0.7] or [0]
    ends = [(number, *dice.choices(range(len(nodes)), k=answers - 1)) for number in wanted]
    of_entry = [{node for end in each for node in tree.path(end)} for each in ends]

    def size(kept):
        return sum(tree.nodes[node].span[1] - tree.nodes[node].span[0] for node in kept)

    budget = max(map(size, of_entry)) + dice.randint(0, 10)
    found = together(TreeCutter(tree, ends, budget).bins())
    assert sorted(entry for each in found for bin_ in each for entry in bin_.entries) == list(range(len(ends)))
    for each in found:
        for number, bin_ in enumerate(each):
            kept = {node for entry in bin_.entries for node in of_entry[entry]}
            assert size(kept) <= budget and kept > set(bin_.above)
            assert bin_.above == (tuple(tree.path(bin_.above[-1])) if bin_.above else ())
            open_cuts = [path for path, first, stop in prefix_cuts(each) if first <= number < stop]
            assert open_cuts == [bin_.above[: depth + 1] for depth in range(len(bin_.above))]
