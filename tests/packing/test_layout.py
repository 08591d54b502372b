"""Packed rows written out by hand."""

import pytest
import torch

from tests.packing.items import continuation, item, prompt
from tiercel.models.layers.attention_span import AttentionSpan
from tiercel.packing.layout import PackItem, pack
from tiercel.packing.tree import groups_tree


def rows_of(mask: torch.Tensor) -> list[str]:
    return ["".join("x" if sees else "." for sees in row) for row in mask[0, 0].tolist()]


def test_dense_mask_by_hand():
    # [P P a b b | Q Q Q c d], a and b continue P, c and d continue Q
    tree = groups_tree((2, 1, 2), (3, 1, 1))
    mask = tree.dense_mask(torch.device("cpu"))
    assert mask.shape == (1, 1, 10, 10) and mask.dtype == torch.bool
    assert rows_of(mask) == [
        "x.........",  # P
        "xx........",
        "xxx.......",  # a
        "xx.x......",  # b
        "xx.xx.....",
        ".....x....",  # Q
        ".....xx...",
        ".....xxx..",
        ".....xxxx.",  # c
        ".....xxx.x",  # d
    ]


def test_dense_mask_of_a_window_by_hand():
    """A picture of three tokens in a prompt of six, before completions of one and three tokens; a token sees itself and
    the two tokens before it in its own sequence."""
    tree = groups_tree((6, 1, 3), picture_spans=((1, 4),))
    assert rows_of(tree.dense_mask(torch.device("cpu"), AttentionSpan(window=3))) == [
        "x.........",
        "xxxx......",  # the picture
        "xxxx......",
        ".xxx......",
        "..xxx.....",
        "...xxx....",
        "....xxx...",  # the first completion
        "....xx.x..",  # the second
        ".....x.xx.",
        ".......xxx",
    ]
    causal = tree.dense_mask(torch.device("cpu"), AttentionSpan(whole_pictures=False))
    assert rows_of(causal)[1] == "xx........"


def test_one_conversation_is_plainly_causal():
    tree = groups_tree((3, 4))
    causal = torch.ones(7, 7).tril().bool()
    assert torch.equal(tree.dense_mask(torch.device("cpu"))[0, 0], causal)


def test_pack_lays_groups_end_to_end():
    first, second = prompt([10, 11], 0), prompt([20, 21, 22], 1)
    packed = pack(
        [
            PackItem(prompt=first, continuations=(continuation(first, [12, 13, 14]), continuation(first, [15]))),
            PackItem(prompt=second, continuations=(continuation(second, [23, 24]),)),
        ]
    )
    assert packed.token_ids_T.tolist() == [10, 11, 12, 13, 14, 15, 20, 21, 22, 23, 24]
    assert packed.positions_DT.tolist() == [[0, 1, 2, 3, 4, 2, 0, 1, 2, 3, 4]]
    assert packed.tree == groups_tree((2, 3, 1), (3, 2))
    # a completion's first token is scored by the last state of its prompt, and each other one by the state before it
    assert packed.scoring_N.tolist() == [1, 2, 3, 1, 8, 9]
    assert packed.targets_N.tolist() == [12, 13, 14, 15, 23, 24]
    assert packed.continuation_of_N.tolist() == [0, 0, 0, 1, 2, 2]


def test_pack_scores_only_the_turns_that_are_trained():
    start = prompt([10, 11, 12])
    rest = continuation(start, [13, 14, 15, 16, 17], [True, True, False, False, True])
    packed = pack([PackItem(prompt=start, continuations=(rest,))])
    assert packed.scoring_N.tolist() == [2, 3, 6]
    assert packed.targets_N.tolist() == [13, 14, 17]
    assert packed.continuation_of_N.tolist() == [0, 0, 0]


@pytest.mark.parametrize("scored", ([False, True], [False, False]))
def test_pack_with_little_or_nothing_scored(scored):
    start = prompt([10])
    other = continuation(start, [13])
    packed = pack([PackItem(prompt=start, continuations=(continuation(start, [11, 12], scored), other))])
    assert packed.targets_N.tolist() == ([12] if scored[1] else []) + [13]
    assert packed.scoring_N.tolist() == ([1] if scored[1] else []) + [0]
    assert packed.continuation_of_N.tolist() == ([0] if scored[1] else []) + [1]


def test_lengths_with_the_prompt_once_and_once_per_completion():
    group = item(10, 3, 4, 5)
    assert group.shared_length == 22
    assert group.repeated_length == 42
