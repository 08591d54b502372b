"""The attention of a vision tower, computed in one call for all neighbouring spans of one length.

A span is a picture, a frame or a window, whose patches attend only to each other. With `sdpa`, transformers calls
attention once for each span, and in each layer it waits for the device to learn the spans' lengths. Here the lengths
stay on the CPU, and the windows of a frame are sorted by length, so that no layer copies anything to bring windows of
one length together.

Shape suffixes: docs/shapes.md. T counts the patches of all spans.
"""

from collections.abc import Mapping
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import AttentionInterface

from tiercel.devices import moved

# Transformers passes all spans in one call, with their bounds, only if the name contains "flash".
IMPLEMENTATION = "tiercel_flash_spans"


def sorted_windows(index: Tensor, bounds: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
    """Sort the windows of each frame by length, so that those of one length are side by side, and return index and
    bounds of the new order. `index` holds the places of merged patches, window by window; `bounds` and `frames` say
    where windows and frames start, in patches."""
    lengths = bounds.diff().long()
    frame_of = torch.bucketize(bounds[:-1], frames, right=True)
    order = (frame_of * (int(lengths.max()) + 1) + lengths).argsort(stable=True)
    merged = int(bounds[-1]) // len(index)
    windows = index.split((lengths // merged).tolist())
    sorted_bounds = torch.cat([bounds[:1], lengths[order].cumsum(0).to(bounds.dtype)])
    return torch.cat([windows[place] for place in order.tolist()]), sorted_bounds


def route_tower(tower: nn.Module) -> None:
    """Make a tower whose layers receive the bounds of spans compute its attention here."""
    config: Any = tower.config
    config._attn_implementation = IMPLEMENTATION
    for module in tower.modules():
        if isinstance(module, nn.Conv3d):
            module.forward = partial(_embedded, module)  # type: ignore[method-assign]


def _embedded(module: nn.Conv3d, patches: Tensor) -> Tensor:
    """Compute the convolution of patches. On a GPU one product is faster, because without cuDNN PyTorch launches
    kernels for each patch. On a CPU the result equals that of transformers to the last bit."""
    return patches_product(module, patches) if patches.is_cuda else nn.Conv3d.forward(module, patches)


def patches_product(module: nn.Conv3d, patches: Tensor) -> Tensor:
    """Compute the convolution as one product if each input has the size of the kernel, and otherwise as PyTorch
    does."""
    if patches.shape[2:] != module.kernel_size or module.groups != 1 or any(module.padding):
        return nn.Conv3d.forward(module, patches)
    return linear(patches.flatten(1), module.weight.flatten(1), module.bias)[:, :, None, None, None]


def tower_inputs(host: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Move arguments of the tower's forward pass to the device, except for the bounds of spans, whose names begin with
    `cu_`. `host` are tensors on the CPU by name."""
    return {name: tensor if name.startswith("cu_") else moved(tensor, device) for name, tensor in host.items()}


def _span_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    scaling: float,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute the output (1, T, A, E) from queries, keys and values (1, A, T, E)."""
    groups = [(len(list(group)), length) for length, group in groupby(cu_seq_lens_q.diff().tolist())]
    sizes = [number * length for number, length in groups]
    parts = zip(groups, *(each[0].split(sizes, dim=1) for each in (query, key, value)), strict=True)
    outputs = []
    for group, *of_group in parts:
        queries, keys, values = (each_ATE.unflatten(1, group).transpose(0, 1) for each_ATE in of_group)
        output = scaled_dot_product_attention(queries, keys, values, scale=scaling)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None], None


AttentionInterface.register(IMPLEMENTATION, _span_attention)
