"""FlexAttention as the learner calls it, compared with one dense attention with a mask, forward and backward.

T tokens of a packed row.
"""

from collections.abc import Iterator
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.running import Cell, verdict
from benchmarks.gpu.setup import Setup
from tiercel.models.layers.attention import Layer
from tiercel.packing.attention.flex import FlexAttention
from tiercel.packing.tree import PrefixTree, groups_tree

LAYOUTS, TOY_LAYOUTS = 50, 3
LONGEST = 150  # of a prompt or completion: rows have up to 4,200 tokens, whose scores the oracle holds in float64
HEADS, KEY_HEADS, SIZE = 4, 2, 128
FLOAT32_LIMIT = 1e-5  # norm of the difference over the norm of the float64 result
BFLOAT16_LIMIT = 2.0  # times the dense computation's own error in bfloat16, in any single tensor
WHAT = "output and gradients of query, key and value"


def attention_cells(is_toy: bool) -> Iterator[Cell]:
    """Yield cells for both precisions, with whole rows, and with completions over the keys and values of an earlier
    pass."""
    for dtype in (torch.float32, torch.bfloat16):
        for is_apart in (False, True):
            rows = "completions after their prompt" if is_apart else "whole rows"
            name = f"flex against dense, {str(dtype).removeprefix('torch.')}, {rows}"
            yield Cell(part="a", name=name, run=partial(attention_check, dtype, is_apart))


def attention_check(dtype: torch.dtype, is_apart: bool, setup: Setup) -> dict[str, Any]:
    """Return the largest error over all trees. Its tree is named by its seed."""
    errors = [_error(seed, dtype, is_apart, setup) for seed in range(TOY_LAYOUTS if setup.is_toy else LAYOUTS)]
    worst = max(range(len(errors)), key=lambda seed: errors[seed] if errors[seed] == errors[seed] else float("inf"))
    if dtype == torch.float32:
        row = verdict(errors[worst], FLOAT32_LIMIT, f"{WHAT}, relative")
    else:
        row = verdict(errors[worst], BFLOAT16_LIMIT, f"{WHAT}, error over that of the dense mask")
    return {**row, "trees": len(errors), "worst_seed": worst}


def random_tree(seed: int, is_apart: bool, longest: int) -> PrefixTree:
    """Return ragged groups, or one group if completions come after their prompt."""
    random = Random(seed)
    groups = []
    for _ in range(1 if is_apart else random.randint(1, 4)):
        prompt = random.choice((1, random.randint(2, longest), 128))
        lengths = [random.choice((1, random.randint(1, longest))) for _ in range(random.randint(1, 6))]
        groups.append((prompt, *lengths))
    return groups_tree(*groups)


def _error(seed: int, dtype: torch.dtype, is_apart: bool, setup: Setup) -> float:
    tree = random_tree(seed, is_apart, 40 if setup.is_toy else LONGEST)
    first = tree.nodes[0].span[1] if is_apart else 0
    exact_inputs = [tensor.double() for tensor in _inputs(tree, dtype, first, seed)]
    has_backward = setup.device.type == "cuda"  # PyTorch refuses flex with a gradient on a CPU

    def results(compute: Any, inputs: list[Tensor]) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_(has_backward) for tensor in inputs]
        output = compute(*leaves)
        if not has_backward:
            return [output.double()]
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).to(output)
        gradients = torch.autograd.grad((output * weights).sum(), leaves)
        return [each.detach().double().cpu() for each in (output, *gradients)]

    def dense(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = tree.dense_mask(query.device)[:, :, first:]
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=SIZE**-0.5, enable_gqa=True)

    flex = FlexAttention(tree, setup.device, tree.after(first))
    inputs = [tensor.to(setup.device) for tensor in _inputs(tree, dtype, first, seed)]
    right = results(dense, exact_inputs)
    found = _relative(results(lambda q, k, v: flex(Layer(index=0, scale=SIZE**-0.5), q, k, v), inputs), right)
    if dtype == torch.float32:
        return max(found)
    return max(mine / other for mine, other in zip(found, _relative(results(dense, inputs), right), strict=True))


def _inputs(tree: PrefixTree, dtype: torch.dtype, first: int, seed: int) -> list[Tensor]:
    """Return query (1, heads, T - first, size), and key and value (1, key heads, T, size)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((HEADS, tree.length - first), (KEY_HEADS, tree.length), (KEY_HEADS, tree.length))
    return [torch.randn(1, heads, length, SIZE, generator=generator).to(dtype) for heads, length in shapes]


def _relative(found: list[Tensor], right: list[Tensor]) -> list[float]:
    return [float((mine - exact).norm() / exact.norm()) for mine, exact in zip(found, right, strict=True)]
