"""One new token in every row over a tree of prompts, against each row's own keys and values in float64."""

import random

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tiercel.models.layers.attention import Layer
from tiercel.models.layers.attention_span import AttentionSpan
from tiercel.packing.tree import Node, PrefixTree, groups_tree
from tiercel.rollout.local.attention import DecodeAttention

HEADS, KEY_HEADS, SIZE, GROUP, TOKENS = 4, 2, 8, 3, 12


def random_tree(dice: random.Random) -> PrefixTree:
    nodes: list[Node] = []

    def grow(parent: int | None, levels: int) -> None:
        number, start = len(nodes), nodes[-1].span[1] if nodes else 0
        nodes.append(Node((start, start + dice.randint(1, 9)), parent))
        for _ in range(dice.randint(0, 3) if levels else 0):
            grow(number, levels - 1)

    for _ in range(2):
        grow(None, 3)
    return PrefixTree(nodes=tuple(nodes))


def filled(tree: PrefixTree, ends: list[int], held_2JTE: Tensor, **options: bool) -> DecodeAttention:
    memory = DecodeAttention(tree, ends, GROUP, TOKENS, **options)
    levels = []
    for numbers in tree.levels:
        places_NP = pad_sequence([torch.arange(*tree.nodes[number].span) for number in numbers], batch_first=True)
        levels.append(tuple(each[:, places_NP].transpose(0, 1).contiguous() for each in held_2JTE))
    memory.put_levels(0, levels)
    memory.arrange()
    return memory


class Rows:
    """The rows of a batch, each with its own tokens."""

    def __init__(self, memory: DecodeAttention, tree: PrefixTree, ends: list[int], held_2JTE: Tensor, window):
        self.memory, self.window = memory, window
        self.prompts = [held_2JTE[:, :, tree.places(end)] for end in ends]
        self.rows = [(prompt, []) for prompt in range(len(ends)) for _ in range(GROUP)]
        self.layer = Layer(index=0, attention_span=AttentionSpan(window=window), scale=0.3)

    def keep(self, places: list[int]) -> None:
        self.memory.keep(places)
        self.rows = [self.rows[place] for place in places]

    def step(self) -> None:
        query_RA1E = torch.randn(len(self.rows), HEADS, 1, SIZE)
        new_2RJ1E = torch.randn(2, len(self.rows), KEY_HEADS, 1, SIZE)
        found_RAE = self.memory(self.layer, query_RA1E, *new_2RJ1E)[:, :, 0]
        for row, (prompt, own) in enumerate(self.rows):
            own.append(new_2RJ1E[:, row])
            keys, values = torch.cat([self.prompts[prompt], *own], dim=2).double()
            seen = slice(0 if self.window is None else -self.window, None)
            query_JQE = query_RA1E[row, :, 0].double().view(KEY_HEADS, -1, SIZE)
            scores = query_JQE @ keys[:, seen].mT * 0.3
            expected_AE = (scores.softmax(-1) @ values[:, seen]).flatten(0, 1)
            torch.testing.assert_close(found_RAE[row].double(), expected_AE, rtol=0, atol=2e-6)
        self.memory.add_token()


@pytest.mark.parametrize("window", (None, 4, 11))
@pytest.mark.parametrize("seed", range(8))
def test_rows_see_the_path_to_their_prompt_and_their_own_tokens(seed, window):
    """While rows leave, and some come back beside rows that have written more."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    tree = random_tree(dice)
    ends = dice.sample(range(len(tree.nodes)), k=dice.randint(1, len(tree.nodes)))
    held_2JTE = torch.randn(2, KEY_HEADS, tree.length, SIZE)
    memory = filled(tree, ends, held_2JTE, rows_return=True)
    rows = Rows(memory, tree, ends, held_2JTE, window)
    for _ in range(3):
        rows.step()
    away = dice.sample(range(len(rows.rows)), k=2)
    states, gone = memory.take(away), [rows.rows[place] for place in away]
    rows.keep([place for place in range(len(rows.rows)) if place not in away])
    for _ in range(3):
        rows.step()
        rows.keep(sorted(dice.sample(range(len(rows.rows)), k=max(1, len(rows.rows) * 2 // 3))))
    memory.append(states)
    rows.rows += gone
    rows.keep(sorted(range(len(rows.rows)), key=memory.prompt_of.__getitem__))
    for _ in range(3):
        rows.step()


def test_keys_of_a_shared_beginning_are_kept_once():
    """Two questions of 2 tokens about a picture of 10, and a prompt of 5 by itself: places for 2 * 10 + 2 * 2 tokens,
    then without the prompt, then without the first question."""
    tree = PrefixTree(nodes=(Node((0, 10)), Node((10, 12), 0), Node((12, 14), 0), Node((14, 19))))
    memory = filled(tree, [1, 2, 3], torch.randn(2, KEY_HEADS, 19, SIZE))

    def places() -> list[tuple[int, int]]:
        return [(keys.shape[0], keys.shape[2]) for keys, _ in (level.held[0] for level in memory.levels)]

    assert places() == [(2, 10), (2, 2)]
    memory.keep(range(6))
    assert places() == [(1, 10), (2, 2)]
    memory.keep([4])
    assert places() == [(1, 10), (1, 2)]


def test_whole_prompts_are_joined_from_their_nodes():
    tree = PrefixTree(nodes=(Node((0, 3)), Node((3, 5), 0), Node((5, 6), 0)))
    held_2JTE = torch.randn(2, KEY_HEADS, 6, SIZE)
    memory = filled(tree, [1, 2, 0], held_2JTE, rows_return=True)
    for found_BJPE, held_JTE in zip(memory.of_prompts(0), held_2JTE, strict=True):
        for prompt, places in enumerate(([0, 1, 2, 3, 4], [0, 1, 2, 5], [0, 1, 2])):
            assert torch.equal(found_BJPE[prompt, :, : len(places)], held_JTE[:, places])


def test_a_shared_beginning_gives_the_bits_of_one_for_each_prompt():
    """Two groups that read one copy of a picture, and each alone with a copy of its own."""
    torch.manual_seed(0)
    tree = PrefixTree(nodes=(Node((0, 40)), Node((40, 42), 0), Node((42, 44), 0)))
    held_2JTE = torch.randn(2, KEY_HEADS, 44, SIZE)
    layer = Layer(index=0, attention_span=AttentionSpan(), scale=0.3)
    query_RA1E, new_2RJ1E = torch.randn(6, HEADS, 1, SIZE), torch.randn(2, 6, KEY_HEADS, 1, SIZE)
    together = filled(tree, [1, 2], held_2JTE)(layer, query_RA1E, *new_2RJ1E)
    chain = PrefixTree(nodes=(Node((0, 40)), Node((40, 42), 0)))
    for number, places in enumerate(([*range(42)], [*range(40), 42, 43])):
        rows = slice(3 * number, 3 * number + 3)
        alone = filled(chain, [1], held_2JTE[:, :, places])(layer, query_RA1E[rows], *new_2RJ1E[:, rows])
        assert torch.equal(alone, together[rows])


def test_without_prompts_there_is_nothing_to_read():
    assert DecodeAttention(groups_tree(), (), 0, 0).levels == []
