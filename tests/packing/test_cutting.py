"""Cuts of trees that do not fit into a microbatch."""

import random

import pytest

from tiercel.packing.cutting import Bin, Cuts, PrefixCut, TreeCutter, bins_in_order
from tiercel.packing.tree import Node, PrefixTree


def tree_of(*nodes: tuple[int, int | None]) -> PrefixTree:
    """Build a tree from the length and the parent of each node."""
    made, start = [], 0
    for length, parent in nodes:
        made.append(Node((start, start + length), parent))
        start += length
    return PrefixTree(nodes=tuple(made))


# A picture of 10 tokens with two questions of 2 tokens; three answers of 3 tokens to the first, two to the second.
PICTURE = tree_of((10, None), (2, 0), (3, 1), (3, 1), (3, 1), (2, 0), (3, 5), (3, 5))
ENDS = [2, 3, 4, 6, 7]


def cuts(budget: int, *, continues: bool = True, tree: PrefixTree = PICTURE, ends: list[int] = ENDS) -> list[Cuts]:
    return TreeCutter(tree, [(end,) for end in ends], budget, continues=continues).cuts()


def test_a_tree_that_fits_is_one_bin():
    assert cuts(29) == [Cuts(bins=[Bin((0, 1, 2, 3, 4))])]


def test_a_tree_is_cut_between_its_questions():
    assert cuts(28) == [Cuts(bins=[Bin((0, 1, 2), 0), Bin((3, 4), 0)], prefixes=[PrefixCut(0, 0, 2)])]


def test_a_question_that_does_not_fit_after_its_picture_is_cut_below_itself():
    assert cuts(18) == [
        Cuts(bins=[Bin((0, 1), 1), Bin((2,), 1), Bin((3, 4), 0)], prefixes=[PrefixCut(0, 0, 3), PrefixCut(1, 0, 2)])
    ]


def test_bins_contain_their_paths_if_no_pass_may_continue_another():
    found = cuts(18, continues=False)
    assert found == [Cuts(bins=[Bin((0, 1))]), Cuts(bins=[Bin((2,))]), Cuts(bins=[Bin((3, 4))])]


def test_roots_that_fit_share_a_bin_around_one_that_does_not():
    tree = tree_of((2, None), (3, None), (4, 1), (4, 1), (2, None), (2, None))
    assert cuts(8, tree=tree, ends=[0, 2, 3, 4, 5]) == [
        Cuts(bins=[Bin((0,))]),
        Cuts(bins=[Bin((1,), 1), Bin((2,), 1)], prefixes=[PrefixCut(1, 0, 2)]),
        Cuts(bins=[Bin((3, 4))]),
    ]


def test_a_row_that_others_continue_goes_with_the_first_of_them():
    tree = tree_of((4, None), (3, 0), (3, 0))
    assert cuts(7, tree=tree, ends=[1, 0, 2])[0].bins == [Bin((0, 1), 0), Bin((2,), 0)]


def test_a_row_that_others_continue_goes_below_the_first_cut():
    tree = tree_of((4, None), (3, 0), (3, 1), (3, 1))  # one row ends with the root, the others with the leaves
    assert cuts(10, tree=tree, ends=[0, 2, 3]) == [
        Cuts(bins=[Bin((0, 1), 1), Bin((2,), 1)], prefixes=[PrefixCut(0, 0, 2), PrefixCut(1, 0, 2)])
    ]


def test_the_answers_of_a_pair_stay_together():
    """Three pairs after a picture of 10: of one question of 2, of two questions, and of one that ends with another."""
    tree = tree_of((10, None), (2, 0), (3, 1), (3, 1), (2, 0), (3, 4), (1, 5))
    pairs = [(2, 3), (3, 6), (5, 6)]
    (found,) = TreeCutter(tree, pairs, 21, continues=True).cuts()
    assert found == Cuts(bins=[Bin((0,), 0), Bin((1, 2), 0)], prefixes=[PrefixCut(0, 0, 2)])
    (found,) = TreeCutter(tree, pairs, 24, continues=True).cuts()
    assert found == Cuts(bins=[Bin((0, 1, 2))])


def test_bins_of_entries_that_share_nothing_are_filled_in_order():
    sizes = [5, 5, 10, 2]
    for budget, expected in ((10, [(0, 1), (2,), (3,)]), (12, [(0, 1), (2, 3)]), (22, [(0, 1, 2, 3)])):
        assert [each.bins[0].entries for each in bins_in_order(sizes, budget)] == expected
    assert bins_in_order([], 10) == []


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
    for continues in (False, True):
        found = TreeCutter(tree, ends, budget, continues=continues).cuts()
        entries = [entry for each in found for bin_ in each.bins for entry in bin_.entries]
        assert sorted(entries) == list(range(len(ends)))
        for each in found:
            for number, bin_ in enumerate(each.bins):
                kept = {node for entry in bin_.entries for node in of_entry[entry]}
                above = set() if bin_.below is None else set(tree.path(bin_.below))
                assert size(kept | above) <= budget and kept > above
                open_cuts = [cut.node for cut in each.prefixes if cut.first <= number < cut.stop]
                assert open_cuts == (tree.path(bin_.below) if bin_.below is not None else [])
