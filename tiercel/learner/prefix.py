"""A separate pass for a prompt, for groups that are too large for one microbatch.

The prompt is run once. Its keys, values and last state are detached from the graph. Every microbatch of completions
adds its gradients to them, and at the end one backward pass through the prompt takes the sums. The gradient equals that
of the whole group, to rounding. Shape suffixes: docs/shapes.md; B is 1 here.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from tiercel.models.attention import AttentionForm


class RecordingAttention:
    """Computes `form` and keeps the keys and values of each layer."""

    def __init__(self, form: AttentionForm):
        self.form = form
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def __call__(self, layer: int, query_BATE: Tensor, key_BJTE: Tensor, value_BJTE: Tensor, scale: float) -> Tensor:
        self.keys.setdefault(layer, key_BJTE)  # activation checkpointing calls this a second time
        self.values.setdefault(layer, value_BJTE)
        return self.form(layer, query_BATE, key_BJTE, value_BJTE, scale)


class PrefixPass:
    """Holds what completions need of their prompt: keys and values by layer, and the last state."""

    def __init__(self, keys: Mapping[int, Tensor], values: Mapping[int, Tensor], last_state_H: Tensor):
        self._outputs = [*keys.values(), *values.values(), last_state_H]
        self.keys = {layer: _leaf(key) for layer, key in keys.items()}
        self.values = {layer: _leaf(value) for layer, value in values.items()}
        self.last_state_H = _leaf(last_state_H)

    def backward(self) -> None:
        """Run the backward pass through the prompt with the gradients that completions have left here."""
        leaves = [*self.keys.values(), *self.values.values(), self.last_state_H]
        pairs = [
            (output, leaf.grad)
            for output, leaf in zip(self._outputs, leaves, strict=True)
            if output.requires_grad and leaf.grad is not None
        ]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])


class ContinuedAttention:
    """Computes `form` over the keys and values of the prompt, from `prefix`, and those of the tokens after it."""

    def __init__(self, form: AttentionForm, prefix: PrefixPass):
        self.form = form
        self.prefix = prefix

    def __call__(self, layer: int, query_BASE: Tensor, key_BJSE: Tensor, value_BJSE: Tensor, scale: float) -> Tensor:
        key_BJTE = torch.cat([self.prefix.keys[layer], key_BJSE], dim=2)
        value_BJTE = torch.cat([self.prefix.values[layer], value_BJSE], dim=2)
        return self.form(layer, query_BASE, key_BJTE, value_BJTE, scale)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(torch.is_grad_enabled())
