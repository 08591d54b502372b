"""FlexAttention's graphs: traced as on a GPU, but run on a CPU operation by operation (`aot_eager`)."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention as pytorchs

from tests.packing.test_attention import ATTENTION_SPANS, CPU, LAYER, TREES, dense, inputs_of, output_and_gradients
from tests.packing.test_block_mask import random_tree
from tiercel.distributed.context import ContextGroup
from tiercel.errors import TrainingError
from tiercel.models.layers.attention_span import FULL, AttentionSpan
from tiercel.packing.attention.block_mask import BLOCK
from tiercel.packing.attention.flex import GRAPHS, FlexAttention, Padding, compiled_flex
from tiercel.packing.context_parallel import part_of
from tiercel.packing.tree import PrefixTree, groups_tree


@pytest.fixture(autouse=True)
def counted_graphs(monkeypatch):
    """Graphs are counted from 0. PyTorch refuses gradients on a CPU, because its kernel for a CPU has none; `aot_eager`
    does not use the kernel."""
    monkeypatch.setattr(pytorchs, "_validate_device", lambda *tensors: None)
    torch._dynamo.reset()
    counters.clear()
    compiled_flex.cache_clear()
    yield
    torch._dynamo.reset()
    compiled_flex.cache_clear()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def require_equal_to_dense(
    tree: PrefixTree, first_query: int = 0, without_gradient: tuple[int, ...] = (), attention_span: AttentionSpan = FULL
) -> None:
    inputs = inputs_of(tree, first_query=first_query)
    flex = FlexAttention(tree, CPU, tree.after(first_query), compiled_flex("aot_eager"))
    for place in without_gradient:
        inputs[place].requires_grad_(False)
    trained = [tensor for tensor in inputs if tensor.requires_grad]
    layer = replace(LAYER, attention_span=attention_span)
    output = flex(layer, *inputs)
    expected = dense(*inputs, tree, first_query, attention_span)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((output * weights).sum(), trained)
    for mine, right in zip(found, torch.autograd.grad((expected * weights).sum(), trained), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(flex(layer, *inputs), expected, rtol=1e-5, atol=1e-5)


def test_two_graphs_serve_all_trees_forward_and_backward():
    """Rows of one block and of many, as many blocks as heads, the first layer's patterns of gradients, passes without a
    gradient, and completions after a prompt that was run before."""
    patterns = [(), (0,), (1, 2), (0, 1), (2,)]
    trees = [*TREES.values(), groups_tree((500, 12)), groups_tree((256,))]
    trees += [random_tree(torch.Generator().manual_seed(seed)) for seed in range(110)]
    small = [tree for tree in trees if tree.length <= 800]
    assert len(small) >= 50
    spans = list(ATTENTION_SPANS.values())
    for number, tree in enumerate(small[:50]):
        attention_span = spans[number % len(spans)]
        require_equal_to_dense(tree, without_gradient=patterns[number % len(patterns)], attention_span=attention_span)
    for lengths in [
        (9, 1, 17, 4, 40),
        (1, 1, 1),
        (5, 7),
        (128, 128),
        (130, 3, 200),
        (300, 1, 127, 70),
        (2, 256),
        (1, 1),
    ]:
        for attention_span in (FULL, AttentionSpan(window=60)):
            require_equal_to_dense(groups_tree(lengths), first_query=lengths[0], attention_span=attention_span)
    assert graphs() == GRAPHS


@pytest.mark.parametrize("size", (2, pytest.param(3, marks=pytest.mark.catalogue)))
def test_each_rank_s_part_of_a_row_is_that_of_the_whole_row(size):
    """What ranks of a group compute, side by side."""
    tree = TREES["ragged"]
    batch = SimpleNamespace(tree=tree, scoring_N=torch.arange(tree.length))
    groups = [ContextGroup(place=place, size=size, processes=None) for place in range(size)]
    parts = [part_of(batch, group, BLOCK) for group in groups]
    padded = parts[0].tree
    for attention_span in (FULL, AttentionSpan(window=7)):
        query, key, value = inputs_of(padded)
        whole = dense(query, key, value, padded, attention_span=attention_span)
        for part in parts:
            flex = FlexAttention(padded, CPU, part.spans, compiled_flex("aot_eager"))
            own = torch.cat([query[:, :, start:stop] for start, stop in part.spans], dim=2)
            expected = torch.cat([whole[:, :, start:stop] for start, stop in part.spans], dim=2)
            torch.testing.assert_close(
                flex(replace(LAYER, attention_span=attention_span), own, key, value), expected, rtol=1e-5, atol=1e-5
            )


def test_a_graph_too_many_is_an_error_and_never_runs_uncompiled():
    tree = TREES["ragged"]
    inputs = inputs_of(tree)
    flex = FlexAttention(tree, CPU, attend=compiled_flex("aot_eager", limit=1))
    flex(LAYER, *inputs)
    with torch.no_grad(), pytest.raises(TrainingError, match=r"flex would compile more than 1 graphs.*form: dense"):
        flex(LAYER, *inputs)
    flex(LAYER, *inputs)  # what is already compiled continues to be used


def test_padding_by_hand():
    assert Padding.of(((0, 8),)) == Padding(front=0, back=248)
    assert Padding.of(((0, 384),)) == Padding(front=0, back=0)
    assert Padding.of(((0, 400),)) == Padding(front=0, back=112)
    # The 300 keys of an earlier pass fill three blocks, and the 100 queries two.
    assert Padding.of(((300, 400),)) == Padding(front=84, back=156)


def test_padding_never_reaches_a_result():
    """Whatever the padding held, outputs would show it as NaN."""
    tree = groups_tree((300, 100))
    inputs = inputs_of(tree, first_query=300)
    values = output_and_gradients(
        lambda q, k, v: FlexAttention(tree, CPU, tree.after(300), compiled_flex("aot_eager"))(LAYER, q, k, v),
        inputs,
    )
    assert all(bool(value.isfinite().all()) for value in values)
    padded = tree.padded(2, 3)
    mask = padded.dense_mask(CPU)[0, 0]
    assert torch.equal(mask[2:-3, 2:-3], tree.dense_mask(CPU)[0, 0])
    assert not mask[2:-3, :2].any() and not mask[2:-3, -3:].any() and mask.diagonal().all()
