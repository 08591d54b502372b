"""Run the attention of a vision tower in one call for all spans of equal length.

A span is a picture, a frame or a window: its patches attend only to each other. With `sdpa`, transformers calls
attention once for each span, and in each layer it waits for the device to learn their lengths. Here the lengths stay on
the CPU, and what follows from them is prepared once for a pass.

Shape suffixes: docs/shapes.md. T counts the patches of all spans.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from tiercel.models.images import moved

# Transformers hands all spans over in one call, with their bounds, only where the name contains "flash".
IMPLEMENTATION = "tiercel_flash_spans"


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """Groups the spans of a layer by length. The bounds are on the CPU."""

    bounds: Tensor  # int32, one more than spans: where each span starts, and T
    groups: tuple[tuple[int, int], ...]  # number and length of the spans of each length, shortest first
    order_T: Tensor | None  # puts spans of one length side by side; None: they are
    place_T: Tensor | None  # where each patch is in that order


def group_spans(bounds: Tensor, device: torch.device) -> Spans:
    """Group the spans between `bounds` (CPU) for attention on the device."""
    starts, lengths = bounds[:-1].long(), bounds.diff().long()
    by_length = lengths.argsort(stable=True)
    groups = tuple((len(list(group)), length) for length, group in groupby(lengths[by_length].tolist()))
    if torch.equal(by_length, torch.arange(len(lengths))):
        return Spans(bounds=bounds, groups=groups, order_T=None, place_T=None)
    sorted_lengths = lengths[by_length]
    shifts = starts[by_length] - (sorted_lengths.cumsum(0) - sorted_lengths)
    order_T = torch.arange(int(bounds[-1])) + shifts.repeat_interleave(sorted_lengths)
    return Spans(bounds=bounds, groups=groups, order_T=moved(order_T, device), place_T=moved(order_T.argsort(), device))


def route_tower(tower: nn.Module) -> None:
    """Make a tower whose layers get bounds of spans compute their attention here."""
    config: Any = tower.config
    config._attn_implementation = IMPLEMENTATION


def tower_inputs(host: Mapping[str, Tensor], device: torch.device) -> dict[str, Any]:
    """Move arguments of the tower's forward pass to the device, except for bounds of spans, and add the groups of
    these spans. `host`: tensors on the CPU by name; transformers' names of bounds begin with `cu_`."""
    bounds = {name: tensor for name, tensor in host.items() if name.startswith("cu_")}
    others = {name: moved(tensor, device) for name, tensor in host.items() if name not in bounds}
    return {**bounds, **others, "tower_spans": tuple(group_spans(each, device) for each in bounds.values())}


def _span_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    scaling: float,
    tower_spans: tuple[Spans, ...] = (),
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute the output (1, T, A, E) of queries, keys and values (1, A, T, E). Without `tower_spans`, as in a forward
    pass of transformers' own, the spans are grouped at every call."""
    spans = next((each for each in tower_spans if each.bounds is cu_seq_lens_q), None)
    if spans is None:
        spans = group_spans(cu_seq_lens_q.cpu(), query.device)
    states = [each[0].transpose(0, 1) for each in (query, key, value)]
    if spans.order_T is not None:
        states = [each_TAE.index_select(0, spans.order_T) for each_TAE in states]
    sizes = [number * length for number, length in spans.groups]
    parts = zip(spans.groups, *(each_TAE.split(sizes) for each_TAE in states), strict=True)
    outputs = []
    for group, *of_group in parts:
        queries, keys, values = (each_TAE.unflatten(0, group).transpose(1, 2) for each_TAE in of_group)
        output = scaled_dot_product_attention(queries, keys, values, scale=scaling)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    output_TAE = torch.cat(outputs)
    if spans.place_T is not None:
        output_TAE = output_TAE.index_select(0, spans.place_T)
    return output_TAE[None], None


AttentionInterface.register(IMPLEMENTATION, _span_attention)
