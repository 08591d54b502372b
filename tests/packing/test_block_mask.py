"""Block masks from spans against those that PyTorch makes from all pairs of tokens."""

import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from tests.packing.test_attention import layout_of
from tiercel.models.layers.sight import FULL, Sight, Span
from tiercel.packing.attention.block_mask import BLOCK, _sees, block_mask
from tiercel.packing.layout import PrefixLayout

CPU = torch.device("cpu")


def random_layout(generator: torch.Generator) -> PrefixLayout:
    """1 to 4 groups, whose prompts and completions have 1 to 400 tokens; some end with a block."""

    def length() -> int:
        largest = (3, 40, 130, 400)[int(torch.randint(4, (), generator=generator))]
        found = int(torch.randint(1, largest + 1, (), generator=generator))
        return 128 * -(-found // 128) if torch.rand((), generator=generator) < 0.2 else found

    def count(largest: int) -> int:
        return int(torch.randint(1, largest + 1, (), generator=generator))

    return layout_of(*(tuple(length() for _ in range(1 + count(5))) for _ in range(count(4))))


def with_pictures(layout: PrefixLayout, generator: torch.Generator) -> PrefixLayout:
    """Each prompt of 3 tokens or more has a picture of a random size."""
    spans = []
    for start, stop in (group.prompt for group in layout.groups):
        if stop - start >= 3:
            first = int(torch.randint(start, stop - 1, (), generator=generator))
            spans.append((first, int(torch.randint(first + 1, stop, (), generator=generator))))
    return replace(layout, picture_spans=tuple(spans))


def require_equal(layout: PrefixLayout, first_query: int, sight: Sight = FULL) -> None:
    require_equal_for(layout, layout.after(first_query), sight)


def require_equal_for(layout: PrefixLayout, queries: tuple[Span, ...], sight: Sight = FULL) -> None:
    found = block_mask(layout, CPU, queries, sight)
    seen_4S = layout.seen_keys(sight).of(queries)
    expected = create_block_mask(_sees(seen_4S, CPU), None, None, seen_4S.shape[1], layout.length, device="cpu")
    assert found.shape == expected.shape and found.seq_lengths == expected.seq_lengths
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, right_counts = getattr(found, f"{name}_num_blocks"), getattr(expected, f"{name}_num_blocks")
        assert torch.equal(counts, right_counts), name
        places, right_places = getattr(found, f"{name}_indices")[0, 0], getattr(expected, f"{name}_indices")[0, 0]
        assert places.dtype == right_places.dtype == torch.int32
        for row, number in enumerate(counts[0, 0].tolist()):
            assert torch.equal(places[row, :number], right_places[row, :number]), name


@pytest.mark.parametrize("start", range(0, 200, 20))
def test_it_equals_pytorchs_own_on_random_layouts(start):
    for seed in range(start, start + 20):
        generator = torch.Generator().manual_seed(seed)
        layout = with_pictures(random_layout(generator), generator)
        for window in (None, int(torch.randint(1, 600, (), generator=generator))):
            require_equal(layout, first_query=0, sight=Sight(window=window))


@pytest.mark.parametrize("lengths", [(9, 1, 17, 4, 40), (128, 128, 256), (300, 1, 127, 400), (5, 7)])
def test_it_equals_pytorchs_own_after_a_prompt_that_was_run_before(lengths):
    for sight in (FULL, Sight(window=1), Sight(window=130)):
        require_equal(layout_of(lengths), first_query=lengths[0], sight=sight)


@pytest.mark.parametrize(("front", "back"), [(0, 60), (119, 0), (119, 300)])
def test_it_equals_pytorchs_own_with_padding(front, back):
    require_equal(layout_of((9, 1, 17, 4, 40), (200, 130)).padded(front, back), first_query=0)
    require_equal(layout_of((9, 1, 170, 4, 40)).padded(front, back), first_query=front + 9)


def test_it_equals_pytorchs_own_for_the_chunks_of_a_rank():
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        layout = with_pictures(random_layout(generator), generator)
        layout = layout.padded(0, -layout.length % (4 * BLOCK))
        chunk = layout.length // 4
        for first in range(2):
            queries = ((first * chunk, (first + 1) * chunk), ((3 - first) * chunk, (4 - first) * chunk))
            for window in (None, int(torch.randint(1, 600, (), generator=generator))):
                require_equal_for(layout, queries, Sight(window=window))


def test_blocks_seen_by_hand():
    """Blocks of 128: the prompt is blocks 0 and 1, the completions are blocks 2 and 3."""
    mask = block_mask(layout_of((256, 128, 128)), CPU)
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
from tests.packing.test_attention import layout_of
from tiercel.packing.attention.block_mask import block_mask
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
block_mask(layout_of(*[(1200, *[200] * 8)] * 39), torch.device("cpu"))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_a_row_of_110_000_tokens_takes_megabytes():
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) < 200e6
