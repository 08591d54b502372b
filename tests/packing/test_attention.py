"""The split form against one dense attention with a mask, on random ragged trees."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tiercel.models.layers.attention import Layer
from tiercel.models.layers.attention_span import FULL, AttentionSpan
from tiercel.packing.attention.split_and_dense import SplitAttention, split_plan
from tiercel.packing.tree import Node, PrefixTree, groups_tree

CPU = torch.device("cpu")
HEADS, KEY_HEADS, SIZE = 4, 2, 16


TREES = {
    "one": groups_tree((5, 3)),
    "prompt alone": groups_tree((7,)),
    "single tokens": groups_tree((1, 1, 1), (1, 1)),
    "ragged": groups_tree((9, 1, 17, 4, 40), (3, 2, 2, 2), (30,), (21, 33, 5, 6, 7, 1)),
    "even": groups_tree((12, 8, 8, 8), (12, 8, 8, 8)),
    "conversations": groups_tree((4, 9), (13, 2), (6, 30)),
    "deep": PrefixTree(
        nodes=tuple(
            Node(span, parent)
            for span, parent in (
                ((0, 9), None),
                ((9, 12), 0),
                ((12, 13), 1),
                ((13, 33), 2),
                ((33, 38), 2),
                ((38, 50), 0),
                ((50, 53), 5),
                ((53, 54), 5),
                ((54, 60), None),
                ((60, 75), 8),
                ((75, 76), 9),
            )
        ),
        picture_spans=((2, 7), (15, 20), (40, 50)),
    ),
    "pictures": groups_tree((9, 1, 17, 4, 40), (12, 2, 2, 2), picture_spans=((2, 7), (71, 73), (74, 82))),
    "a picture in a later turn": groups_tree((4, 9), (6, 30), picture_spans=((1, 3), (5, 9), (20, 45))),
}
ATTENTION_SPANS = {
    "full": FULL,
    "causal": AttentionSpan(whole_pictures=False),
    **{f"window of {window}": AttentionSpan(window=window) for window in (1, 2, 7, 20, 64)},
    "causal window": AttentionSpan(window=5, whole_pictures=False),
}
LAYER = Layer(index=0, scale=0.3)


def inputs_of(tree: PrefixTree, dtype: torch.dtype = torch.float32, first_query: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tree.length)
    shapes = [(HEADS, tree.length - first_query), (KEY_HEADS, tree.length), (KEY_HEADS, tree.length)]
    return [
        torch.randn(1, length, heads, SIZE, generator=generator).to(dtype).transpose(1, 2).requires_grad_()
        for heads, length in shapes
    ]


def dense(
    query: Tensor, key: Tensor, value: Tensor, tree: PrefixTree, first_query: int = 0, attention_span=FULL
) -> Tensor:
    mask = tree.dense_mask(CPU, attention_span, tree.after(first_query))
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True)


def output_and_gradients(compute, inputs: list[Tensor]) -> list[Tensor]:
    output = compute(*inputs)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad((output * weights).sum(), inputs)]


@pytest.mark.parametrize("attention_span", ATTENTION_SPANS.values(), ids=ATTENTION_SPANS)
@pytest.mark.parametrize("name", TREES)
def test_split_equals_a_dense_mask_forward_and_backward(name, attention_span):
    tree = TREES[name]
    inputs = inputs_of(tree)
    attend, layer = SplitAttention(tree, CPU), replace(LAYER, attention_span=attention_span)
    found = output_and_gradients(lambda q, k, v: attend(layer, q, k, v), inputs)
    expected = output_and_gradients(lambda q, k, v: dense(q, k, v, tree, attention_span=attention_span), inputs)
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention_span", ATTENTION_SPANS.values(), ids=ATTENTION_SPANS)
@pytest.mark.parametrize("lengths", [(9, 1, 17, 4, 40), (1, 1, 1), (5, 7)])
def test_completions_over_keys_of_an_earlier_pass(lengths, attention_span):
    tree, first = groups_tree(lengths), lengths[0]
    inputs = inputs_of(tree, first_query=first)
    attend, layer = SplitAttention(tree, CPU, tree.after(first)), replace(LAYER, attention_span=attention_span)
    found = output_and_gradients(lambda q, k, v: attend(layer, q, k, v), inputs)
    expected = output_and_gradients(lambda q, k, v: dense(q, k, v, tree, first, attention_span), inputs)
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("attention_span", (FULL, AttentionSpan(window=7)))
def test_in_bfloat16_split_is_as_close_to_float32_as_a_dense_mask_is(attention_span):
    tree = TREES["ragged"]
    inputs = inputs_of(tree, torch.bfloat16)
    exact_inputs = [tensor.detach().float().requires_grad_() for tensor in inputs]
    exact = output_and_gradients(lambda q, k, v: dense(q, k, v, tree, attention_span=attention_span), exact_inputs)
    plain = output_and_gradients(lambda q, k, v: dense(q, k, v, tree, attention_span=attention_span), inputs)
    attend, layer = SplitAttention(tree, CPU), replace(LAYER, attention_span=attention_span)
    found = output_and_gradients(lambda q, k, v: attend(layer, q, k, v), inputs)
    for mine, other, right in zip(found, plain, exact, strict=True):
        assert relative(mine, right) <= 1.2 * relative(other, right)


def test_a_plan_by_hand():
    plan = split_plan(groups_tree((4, 2, 3, 8), (2,)), CPU)
    blocks = [(block.queries, block.keys, block.is_causal) for block in (*plan.roots, *plan.over)]
    assert blocks == [((0, 4), (0, 4), True), ((17, 19), (17, 19), True), ((4, 17), (0, 4), False)]
    # 3 is more than 1.25 times 2, and 8 more than 1.25 times 3
    assert [bucket.places_RL.tolist() for bucket in plan.buckets] == [
        [[4, 5]],
        [[6, 7, 8]],
        [[9, 10, 11, 12, 13, 14, 15, 16]],
    ]
    (bucket,) = split_plan(groups_tree((4, 4, 5)), CPU).buckets
    assert bucket.places_RL.tolist() == [[4, 5, 6, 7, 7], [8, 9, 10, 11, 12]]
    assert bucket.valid.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9]
