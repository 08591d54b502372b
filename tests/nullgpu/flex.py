"""Compile the learner's attention, forward and backward, for heads of a shape: `python -m tests.nullgpu.flex
28,4,128,bfloat16 ..` prints for each what its kernels need on the card, or why they do not fit."""

import contextlib
import io
import json
import sys
import warnings
from typing import Any

import torch

from tests.nullgpu.log import logged
from tiercel.models.layers.attention import Layer
from tiercel.packing.attention.flex import FlexAttention, compiled_flex
from tiercel.packing.layout import GroupSpans, PrefixLayout

PROMPT, COMPLETION, COMPLETIONS = 1180, 200, 8  # tokens of a group of the 7B


def layout() -> PrefixLayout:
    starts = range(PROMPT, PROMPT + COMPLETIONS * COMPLETION, COMPLETION)
    completions = tuple((start, start + COMPLETION) for start in starts)
    group = GroupSpans(prompt=(0, PROMPT), completions=completions)
    return PrefixLayout(groups=(group,), length=completions[-1][1])


def compile_for(shape: str) -> dict[str, Any]:
    """Compile for `heads,key heads,size,dtype`."""
    *numbers, kind = shape.split(",")
    heads, key_heads, size = map(int, numbers)
    torch._dynamo.reset()
    compiled_flex.cache_clear()
    problem = ""
    with logged() as log:
        query, key, value = (
            torch.zeros(1, count, layout().length, size, device="cuda", dtype=getattr(torch, kind), requires_grad=True)
            for count in (heads, key_heads, key_heads)
        )
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                form = FlexAttention(layout(), torch.device("cuda"))
                form(Layer(index=0, scale=size**-0.5), query, key, value).sum().backward()
        except RuntimeError as error:
            problem = str(error)
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
    return {"shape": shape, "problem": problem, **kernels}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for given in sys.argv[1:]:
        print(json.dumps(compile_for(given)), flush=True)
