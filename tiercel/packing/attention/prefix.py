"""A separate pass for a prompt, for groups that are too large for one microbatch.

The prompt is run once. What its completions need from it is detached from the graph: keys and values, states of delta
nets, and the last hidden state. Every microbatch of completions adds its gradients to them, and at the end one backward
pass through the prompt uses the sums. The gradient equals that of the whole group, up to rounding. Shape suffixes:
docs/shapes.md; B is 1 here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tiercel.models.layers.attention import Layer
from tiercel.models.layers.delta_net import DeltaScan, DeltaState, DeltaTokens
from tiercel.packing.forms import PackedForm


@dataclass(frozen=True, kw_only=True, slots=True)
class KeysValues:
    """The keys and values of a layer with attention."""

    key_BJTE: Tensor
    value_BJTE: Tensor


Kept = KeysValues | DeltaState  # what completions need from a layer


class RecordingAttention:
    """The computation of `form`, with a record of what completions need from each layer."""

    def __init__(self, form: PackedForm):
        self.form = form
        self.kept: dict[int, Kept] = {}

    def __call__(self, layer: Layer, query_BATE: Tensor, key_BJTE: Tensor, value_BJTE: Tensor) -> Tensor:
        # Activation checkpointing calls this a second time.
        self.kept.setdefault(layer.index, KeysValues(key_BJTE=key_BJTE, value_BJTE=value_BJTE))
        return self.form(layer, query_BATE, key_BJTE, value_BJTE)

    def recur(self, layer: int, tokens: DeltaTokens, scan: DeltaScan) -> Tensor:
        output, state = self.form.recurrence(tokens, scan, keeps_last=True)
        assert state is not None
        self.kept.setdefault(layer, state)
        return output


class PrefixPass:
    """What completions need from their prompt: the record of each layer, and the last hidden state."""

    def __init__(self, kept: Mapping[int, Kept], last_state_H: Tensor):
        self.layers = {layer: _leaves(of_layer) for layer, of_layer in kept.items()}
        self.last_state_H = _leaf(last_state_H)
        outputs = [tensor for of_layer in kept.values() for tensor in _tensors(of_layer)]
        leaves = [tensor for of_layer in self.layers.values() for tensor in _tensors(of_layer)]
        self._pairs = list(zip([*outputs, last_state_H], [*leaves, self.last_state_H], strict=True))

    def backward(self) -> None:
        """Run the backward pass through the prompt with the gradients that completions have left here."""
        pairs = [(output, leaf.grad) for output, leaf in self._pairs if output.requires_grad and leaf.grad is not None]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])


class ContinuedAttention:
    """The computation of `form` after the prompt of `prefix`: it attends to the prompt's keys and values and to those
    of the tokens after it, and starts from the prompt's states."""

    def __init__(self, form: PackedForm, prefix: PrefixPass):
        self.form = form
        self.prefix = prefix

    def __call__(self, layer: Layer, query_BASE: Tensor, key_BJSE: Tensor, value_BJSE: Tensor) -> Tensor:
        of_prompt = self.prefix.layers[layer.index]
        assert isinstance(of_prompt, KeysValues)
        key_BJTE = torch.cat([of_prompt.key_BJTE, key_BJSE], dim=2)
        value_BJTE = torch.cat([of_prompt.value_BJTE, value_BJSE], dim=2)
        return self.form(layer, query_BASE, key_BJTE, value_BJTE)

    def recur(self, layer: int, tokens: DeltaTokens, scan: DeltaScan) -> Tensor:
        of_prompt = self.prefix.layers[layer]
        assert isinstance(of_prompt, DeltaState)
        return self.form.recurrence(tokens, scan, of_prompt)[0]


def _tensors(kept: Kept) -> list[Tensor]:
    return [getattr(kept, field.name) for field in fields(kept)]


def _leaves(kept: Kept) -> Kept:
    return type(kept)(**{field.name: _leaf(getattr(kept, field.name)) for field in fields(kept)})


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(torch.is_grad_enabled())
