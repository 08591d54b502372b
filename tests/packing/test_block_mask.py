"""Block masks from spans against those that PyTorch makes from all pairs of tokens."""

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from tiercel.models.layers.attention_span import FULL, AttentionSpan, Span
from tiercel.packing.attention.block_mask import BLOCK, _sees, block_mask
from tiercel.packing.tree import Node, PrefixTree, groups_tree

CPU = torch.device("cpu")


def random_tree(generator: torch.Generator) -> PrefixTree:
    """1 to 20 nodes in a random tree, each of 1 to 400 tokens; some end with a block."""

    def length() -> int:
        largest = (3, 40, 130, 400)[int(torch.randint(4, (), generator=generator))]
        found = int(torch.randint(1, largest + 1, (), generator=generator))
        return 128 * -(-found // 128) if torch.rand((), generator=generator) < 0.2 else found

    def count(largest: int) -> int:
        return int(torch.randint(1, largest + 1, (), generator=generator))

    nodes, start, path = [], 0, []
    for _ in range(count(20)):
        path = path[: count(len(path) + 1) - 1]
        stop = start + length()
        nodes.append(Node((start, stop), path[-1] if path else None))
        path.append(len(nodes) - 1)
        start = stop
    return PrefixTree(nodes=tuple(nodes))


def with_pictures(tree: PrefixTree, generator: torch.Generator) -> PrefixTree:
    """Each node of 3 tokens or more has a picture of a random size."""
    spans = []
    for start, stop in (node.span for node in tree.nodes):
        if stop - start >= 3:
            first = int(torch.randint(start, stop - 1, (), generator=generator))
            spans.append((first, int(torch.randint(first + 1, stop, (), generator=generator))))
    return replace(tree, picture_spans=tuple(spans))


def require_equal(tree: PrefixTree, first_query: int, attention_span: AttentionSpan = FULL) -> None:
    require_equal_for(tree, tree.after(first_query), attention_span)


def require_equal_for(tree: PrefixTree, queries: tuple[Span, ...], attention_span: AttentionSpan = FULL) -> None:
    found = block_mask(tree, CPU, queries, attention_span)
    visibility = tree.visibility(attention_span)
    queries_3S = visibility.of_queries(queries)
    sees = _sees(queries_3S, visibility.keys_2T, CPU)
    expected = create_block_mask(sees, None, None, queries_3S.shape[1], tree.length, device="cpu")
    assert found.shape == expected.shape and found.seq_lengths == expected.seq_lengths
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, right_counts = getattr(found, f"{name}_num_blocks"), getattr(expected, f"{name}_num_blocks")
        assert torch.equal(counts, right_counts), name
        places, right_places = getattr(found, f"{name}_indices")[0, 0], getattr(expected, f"{name}_indices")[0, 0]
        assert places.dtype == right_places.dtype == torch.int32
        for row, number in enumerate(counts[0, 0].tolist()):
            assert torch.equal(places[row, :number], right_places[row, :number]), name


@pytest.mark.parametrize("start", range(0, 200, 20))
def test_it_equals_pytorchs_own_on_random_trees(start):
    for seed in range(start, start + 20):
        generator = torch.Generator().manual_seed(seed)
        tree = with_pictures(random_tree(generator), generator)
        for window in (None, int(torch.randint(1, 600, (), generator=generator))):
            require_equal(tree, first_query=0, attention_span=AttentionSpan(window=window))


@pytest.mark.parametrize("lengths", [(9, 1, 17, 4, 40), (128, 128, 256), (300, 1, 127, 400), (5, 7)])
def test_it_equals_pytorchs_own_after_a_prompt_that_was_run_before(lengths):
    for attention_span in (FULL, AttentionSpan(window=1), AttentionSpan(window=130)):
        require_equal(groups_tree(lengths), first_query=lengths[0], attention_span=attention_span)


@pytest.mark.parametrize(("front", "back"), [(0, 60), (119, 0), (119, 300)])
def test_it_equals_pytorchs_own_with_padding(front, back):
    require_equal(groups_tree((9, 1, 17, 4, 40), (200, 130)).padded(front, back), first_query=0)
    require_equal(groups_tree((9, 1, 170, 4, 40)).padded(front, back), first_query=front + 9)


def test_it_equals_pytorchs_own_for_the_chunks_of_a_rank():
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        tree = with_pictures(random_tree(generator), generator)
        tree = tree.padded(0, -tree.length % (4 * BLOCK))
        chunk = tree.length // 4
        for first in range(2):
            queries = ((first * chunk, (first + 1) * chunk), ((3 - first) * chunk, (4 - first) * chunk))
            for window in (None, int(torch.randint(1, 600, (), generator=generator))):
                require_equal_for(tree, queries, AttentionSpan(window=window))


def test_blocks_seen_by_hand():
    """Blocks of 128: the prompt is blocks 0 and 1, the completions are blocks 2 and 3."""
    mask = block_mask(groups_tree((256, 128, 128)), CPU)
    partial = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]  # the diagonal is causal
    full = [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]
    for name, rows in (("kv", partial), ("full_kv", full)):
        counts = getattr(mask, f"{name}_num_blocks")[0, 0].tolist()
        places = getattr(mask, f"{name}_indices")[0, 0].tolist()
        assert [sorted(row[:n]) for row, n in zip(places, counts, strict=True)] == [
            list(itertools.compress(range(4), row)) for row in rows
        ]


PEAK = """
import resource, torch
from tiercel.packing.tree import groups_tree
from tiercel.packing.attention.block_mask import block_mask
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
block_mask(groups_tree(*[(1200, *[200] * 8)] * 39), torch.device("cpu"))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_a_row_of_110_000_tokens_takes_megabytes():
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) < 200e6
