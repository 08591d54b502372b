"""Compile FlexAttention for a model's heads on the GPU that is there, before a rollout was paid for."""

import re
from functools import cache
from typing import Any

import torch

from tiercel.learner.block_mask import BLOCK
from tiercel.learner.flex import FlexAttention
from tiercel.learner.layout import GroupSpans, PrefixLayout
from tiercel.models.attention import Heads, Layer, heads_of
from tiercel.models.memory_errors import is_out_of_memory

_NEEDS = re.compile(r"Required: (\d+)\D+Hardware limit: ?(\d+)")


def flex_obstacle(config: Any, dtype: torch.dtype, device: torch.device, *, learns: bool) -> str | None:
    """Say why the GPU cannot run the attention of a decoder of this config; None where it can. The kernels are those of
    the run, which then has no need to compile them. `learns`: with the backward pass."""
    for heads in sorted(set(heads_of(config))):
        if obstacle := _obstacle(config.num_attention_heads, heads, dtype, device, learns):
            return obstacle
    return None


@cache
def _obstacle(query_heads: int, heads: Heads, dtype: torch.dtype, device: torch.device, learns: bool) -> str | None:
    length = 2 * BLOCK
    layout = PrefixLayout(groups=(GroupSpans(prompt=(0, BLOCK), completions=((BLOCK, length),)),), length=length)
    query, key, value = (
        torch.zeros(1, count, length, heads.size, device=device, dtype=dtype, requires_grad=learns)
        for count in (query_heads, heads.keys, heads.keys)
    )
    try:
        with torch.set_grad_enabled(learns):
            output = FlexAttention(layout, device)(Layer(index=0, scale=heads.size**-0.5), query, key, value)
        if learns:
            output.sum().backward()
    except RuntimeError as error:  # of the compiler, whose own classes differ by version
        if is_out_of_memory(error) and _NEEDS.search(str(error)) is None:
            raise
        return f"cannot be compiled for heads of {heads.size} in {dtype} on {_name(device)}: {_reason(error)}"
    return None


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _reason(error: RuntimeError) -> str:
    """Return the card's limit where the compiler names it, else the first line of what it says."""
    if needs := _NEEDS.search(str(error)):
        required, limit = map(int, needs.groups())
        return f"a block needs {required:,} bytes of shared memory, and the card has {limit:,}"
    return (str(error).strip() or type(error).__name__).splitlines()[0]
