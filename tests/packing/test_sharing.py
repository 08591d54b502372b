"""Trees built from sequences: by hand, and random ones against their sequences."""

import random
from dataclasses import replace

import pytest
import torch

from tests.packing.items import NINES, bins, continuation, picture, prompt
from tiercel.errors import DataError
from tiercel.packing import sharing
from tiercel.packing.layout import PackItem, pack
from tiercel.packing.tree import Node


@pytest.fixture(autouse=True)
def short_pieces_are_shared(monkeypatch):
    monkeypatch.setattr(sharing, "SHORTEST", 3)


def item(asked, *answers, pictures="", index=0):
    start = replace(prompt(asked, index), images=tuple(map(picture, pictures)))
    return PackItem(prompt=start, continuations=tuple(continuation(start, answer) for answer in answers))


def nodes(packed):
    return [packed.token_ids_T[slice(*node.span)].tolist() for node in packed.tree.nodes]


def test_questions_of_one_picture_by_hand():
    packed = pack([item([1, 9, 2, 3], [5], [6], pictures="a"), item([1, 9, 2, 4], [7, 8], pictures="a")], NINES)
    assert nodes(packed) == [[1, 9, 2], [3], [5], [6], [4], [7, 8]]
    assert [node.parent for node in packed.tree.nodes] == [None, 0, 1, 1, 0, 4]
    assert packed.ends_C == (2, 3, 5) and packed.repeated_length == 5 + 5 + 6
    assert packed.scoring_N.tolist() == [3, 3, 6, 7] and packed.targets_N.tolist() == [5, 6, 7, 8]
    assert packed.positions_DT.tolist() == [[0, 1, 2, 3, 4, 4, 3, 4, 5]]
    assert [image.sha256 for image in packed.images] == ["a"] and packed.image_nodes == (0,)
    assert len(pack([item([1, 9, 2, 3], [5], pictures="a")] * 2).tree.nodes) == 4  # apart, without a family


@pytest.mark.parametrize(
    ("asked", "pictures", "shared"),
    (
        (([1, 2, 3, 9, 4], [1, 2, 3, 9, 4]), ("a", "b"), [1, 2, 3]),  # another picture
        (([1, 2, 9, 3, 4], [1, 2, 9, 3, 4]), ("a", "b"), None),  # the same, but too little before it
        (([1, 2, 3, 9, 4], [1, 2, 3, 4]), ("a", ""), [1, 2, 3]),
        (([1, 2, 3, 4], [1, 2, 3, 4, 5]), ("", ""), [1, 2, 3, 4]),  # one is the beginning of the other
        (([1, 2, 5], [1, 2, 6]), ("", ""), None),
    ),
)
def test_what_is_shared_by_hand(asked, pictures, shared):
    rows = [
        item(each, [5], pictures=names, index=n) for n, (each, names) in enumerate(zip(asked, pictures, strict=True))
    ]
    packed = pack(rows, NINES)
    roots = [node for node in packed.tree.nodes if node.parent is None]
    assert len(roots) == (2 if shared is None else 1)
    assert shared is None or nodes(packed)[0] == shared


def test_bins_are_filled_by_what_the_tree_takes():
    rows = [(item([1, 9, 2, n], [n], pictures="a"),) for n in (3, 4, 5)] + [(item([1, 9, 2, 6], [6], pictures="b"),)]
    assert bins(rows, "split", 10) == [[0, 1], [2, 3]]  # 5 tokens each
    assert bins(rows, "split", 10, NINES) == [[0, 1, 2], [3]]  # 5, and 2 for each further question
    assert bins(rows, "split", 8, NINES) == [[0, 1], [2], [3]]
    assert bins(rows, "repeated", 10, NINES) == [[0, 1], [2, 3]]
    pair = (item([1, 9, 2], [3, 4], pictures="a"), item([1, 9, 2], [3, 5], pictures="a"))
    assert bins([pair], "split", 7, NINES) == [[0]]  # its prompt counts once
    with pytest.raises(DataError):
        bins([pair], "split", 6, NINES)


def test_a_row_that_others_continue_is_cut_out_of_the_path_above_them():
    rows = [item([1, 2, 3], [4, 5, 6]), item([1, 2, 3, 4, 5, 6, 7, 8, 0], [10], [11], index=1)]
    packed = pack(rows, NINES)
    assert nodes(packed) == [[1, 2, 3], [4, 5, 6], [7, 8, 0], [10], [11]] and packed.ends_C == (1, 3, 4)
    part = packed.only([0, 1], above=(0, 1, 2))  # as cut at a budget of 10 tokens
    assert nodes(part) == [[1, 2, 3, 4, 5, 6, 7, 8, 0], [10]] and part.ends_C == (0, 1)
    assert part.scoring_N.tolist() == [2, 3, 4, 8] and part.targets_N.tolist() == [4, 5, 6, 10]


def test_a_picture_is_never_cut():
    one = item([1, 9, 9, 9, 9, 2], [5], pictures="")
    one = replace(one, prompt=replace(one.prompt, images=(picture("a", 4),)))
    other = item([1, 9, 9, 2, 2, 2], [5], pictures="")
    other = replace(other, prompt=replace(other.prompt, images=(picture("b", 2),)))
    assert len([node for node in pack([one, other], NINES).tree.nodes if node.parent is None]) == 2


def test_answers_that_begin_alike_fork_and_equal_ones_are_one():
    packed = pack([item([1, 2], [3, 4, 5, 6], [3, 4, 5, 7], [3, 4, 5, 6], [3, 4, 5])], NINES)
    assert nodes(packed) == [[1, 2], [3, 4, 5], [6], [7]]
    assert packed.ends_C == (2, 3, 2, 1)
    assert packed.scoring_N.tolist() == [1, 2, 3, 4] * 3 + [1, 2, 3]
    only = packed.only([1, 2])
    assert nodes(only) == nodes(packed) and only.ends_C == (3, 2)
    assert nodes(packed.only([3])) == [[1, 2], [3, 4, 5]]


@pytest.mark.parametrize("seed", range(60))
def test_every_sequence_of_a_random_tree_is_a_path(seed):
    """Sequences of two words, so that they often begin alike; nines are pictures, of which there are two."""
    dice = random.Random(seed)
    items = []
    for index in range(dice.randint(1, 9)):
        asked = [1, *dice.choices([1, 2, 9], k=dice.randint(1, 9))]
        names = "".join(dice.choice("aab") for _ in range(asked.count(9)))
        answers = [dice.choices([1, 2], k=dice.randint(1, 9)) for _ in range(dice.randint(1, 4))]
        items.append(item(asked, *answers, pictures=names, index=index))
    packed = pack(items, NINES)
    wanted = [(each.prompt, answer) for each in items for answer in each.continuations]
    assert len(packed.ends_C) == len(wanted)
    for number, (start, answer) in enumerate(wanted):
        places = packed.tree.places(packed.ends_C[number])
        ids = start.token_ids_P.tolist() + answer.token_ids_L.tolist()
        assert packed.token_ids_T[places].tolist() == ids
        assert packed.positions_DT[0, places].tolist() == list(range(len(ids)))
        path = packed.tree.path(packed.ends_C[number])
        shown = [image.sha256 for image, node in zip(packed.images, packed.image_nodes, strict=True) if node in path]
        assert shown == [image.sha256 for image in start.images]
        mine = packed.continuation_of_N == number
        assert packed.targets_N[mine].tolist() == answer.token_ids_L.tolist()
        assert packed.scoring_N[mine].tolist() == places[len(start.token_ids_P) - 1 : -1].tolist()
    assert int((packed.token_ids_T == 9).sum()) == len(packed.images)
    assert packed.tree.length <= packed.repeated_length
    assert all(isinstance(node, Node) and node.span[0] < node.span[1] for node in packed.tree.nodes)
    ends = torch.tensor([node.span[1] for node in packed.tree.nodes])
    assert bool((ends.diff() > 0).all())


def test_tokens_at_the_same_place_are_scored_once():
    answers = [[5, 6, 7, 1], [5, 6, 7, 2], [5, 8]]
    packed = pack([item([1, 9, 2], *answers, pictures="a")], NINES)  # the first three tokens of two answers are shared
    first_M, which_N = packed.distinct()
    distinct = [(int(packed.scoring_N[n]), int(packed.targets_N[n])) for n in first_M]
    assert len(distinct) == len(set(distinct)) == 6 and len(packed.targets_N) == 10
    assert torch.equal(packed.scoring_N[first_M][which_N], packed.scoring_N)
    assert torch.equal(packed.targets_N[first_M][which_N], packed.targets_N)
    assert first_M[which_N].tolist() == [0, 1, 2, 3, 0, 1, 2, 7, 0, 9]  # the last answer begins with the same token
    assert pack([item([1, 9, 2], [5, 6], [7, 8], pictures="a")], NINES).distinct() is None
