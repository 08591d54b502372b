"""Compile the attention of learner and decoder for heads of a shape: `python -m tests.nullgpu.flex 28,4,128,bfloat16
..` prints for each what its kernels need on the card, or why they do not fit."""

import contextlib
import io
import json
import logging
import sys
import warnings
from typing import Any

import torch

from tests.nullgpu.log import logged
from tiercel.models.layers.attention import Layer
from tiercel.packing.attention.flex import KERNELS, FlexAttention, Kernels, KernelTile, compiled_flex, reason_of
from tiercel.packing.tree import PrefixTree, groups_tree
from tiercel.rollout.local.attention_kernels import kernel_for
from tiercel.rollout.local.static_cache import BatchSize, FixedMemory

PROMPT, COMPLETION, COMPLETIONS = 1180, 200, 8  # tokens of a group of the 7B


def tree() -> PrefixTree:
    return groups_tree((PROMPT, *[COMPLETION] * COMPLETIONS))


def compile_for(shape: str) -> dict[str, Any]:
    """Compile for `heads,key heads,size,dtype`."""
    *numbers, kind = shape.split(",")
    heads, key_heads, size = map(int, numbers)
    dtype = getattr(torch, kind)
    return {
        "shape": shape,
        "capability": torch.cuda.get_device_capability(),
        **learner_for(heads, key_heads, size, dtype),
        **decoder_for(heads, key_heads, size, dtype),
    }


def learner_for(heads: int, key_heads: int, size: int, dtype: torch.dtype) -> dict[str, Any]:
    """Compile FlexAttention, forward and backward."""
    torch._dynamo.reset()
    compiled_flex.cache_clear()
    problem = ""
    with logged() as log:
        query, key, value = (
            torch.zeros(1, count, tree().length, size, device="cuda", dtype=dtype, requires_grad=True)
            for count in (heads, key_heads, key_heads)
        )
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                form = FlexAttention(tree(), torch.device("cuda"))
                form(Layer(index=0, scale=size**-0.5), query, key, value).sum().backward()
        except RuntimeError as error:
            problem = reason_of(error)
    shared = {entry.name: entry.numbers[2] for entry in log.of("launch")}
    kernels = {
        "backward" if "backward" in entry.name else "forward": {
            "registers": entry.numbers[0],
            "stack_bytes": entry.numbers[1],
            "shared_bytes": shared.get(entry.name),
        }
        for entry in log.of("module")
        if "tem_" in entry.name
    }
    return {"problem": problem, **kernels}


def decoder_for(heads: int, key_heads: int, size: int, dtype: torch.dtype) -> dict[str, Any]:
    """Attend from one token of each row as the decoder does, and return which kernel is chosen and the most that it
    requires."""
    device, group_size, new_tokens = torch.device("cuda"), 4, 64
    memory = FixedMemory(BatchSize(prompts=2, prompt_tokens=256, group_size=group_size, new_tokens=new_tokens), device)
    memory.begin((256, 130), group_size)
    rows, like = 2 * group_size, torch.zeros(1, key_heads, 1, size, device=device, dtype=dtype)
    kernel = kernel_for(like)
    prompts, own = kernel.memory(like, 2, 256), kernel.memory(like, rows, new_tokens)
    query, places = like.new_zeros(rows, key_heads, heads // key_heads, size), memory.places.of(rows)
    with logged() as log:
        kernel.over_own(query, own, own, places, size**-0.5)
        kernel.over_prompts(query, prompts, prompts, places, size**-0.5)
    shared = max(entry.numbers[2] for entry in log.of("launch"))
    form = type(kernel).__name__.removesuffix("Kernel").lower()
    return {"decoder": {"form": form, "shared_bytes": shared, "refused": len(log.refused)}}


def plant_large_tiles() -> None:
    """Choose tiles for heads of 256 that fit an H100 and not a card with 99 KB of shared memory."""
    tile = KernelTile(queries=64, keys=64, stages=2, warps=8)
    KERNELS[2][256] = Kernels(forward=None, backward=tile)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    shapes = sys.argv[1:]
    if shapes[0] == "large tiles":
        shapes = shapes[1:]
        plant_large_tiles()
    for given in shapes:
        print(json.dumps(compile_for(given)), flush=True)
