"""A separate pass for a prefix, for trees that are too large for one microbatch.

The prefix is run once. What the tokens after it need is detached from the graph: keys and values, states of delta
nets, and the last hidden states. Every microbatch after it adds its gradients to them, and at the end one backward
pass through the prefix uses the sums. A prefix may continue another one, to which its own backward pass adds gradients
in the same way. The gradient equals that of the whole tree, up to rounding.

Shape suffixes: docs/shapes.md; B is 1 here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Protocol

import torch
from torch import Tensor

from tiercel.models.layers.attention import AttentionForm, Layer
from tiercel.models.layers.delta_net import DeltaScan, DeltaState, DeltaTokens
from tiercel.packing.batch import MicrobatchUnit
from tiercel.packing.layout import PackedTokens
from tiercel.packing.recurrence import PackedForm
from tiercel.types import EncodedImage


@dataclass(frozen=True, kw_only=True, slots=True)
class KeysValues:
    """The keys and values of a layer with attention."""

    key_BJTE: Tensor
    value_BJTE: Tensor


LayerCache = KeysValues | DeltaState  # what later tokens need from a layer


class RecordingAttention:
    """The computation of `form`, after `before` if there is such a prefix, with a record of what the tokens after it
    need from each layer."""

    def __init__(self, form: PackedForm, before: "PrefixCache | None"):
        self.form = form
        self.attend: AttentionForm = form if before is None else ContinuedAttention(form, before)
        self.before = before
        self.kept: dict[int, LayerCache] = {}

    def __call__(self, layer: Layer, query_BATE: Tensor, key_BJTE: Tensor, value_BJTE: Tensor) -> Tensor:
        # Activation checkpointing calls this a second time.
        self.kept.setdefault(layer.index, KeysValues(key_BJTE=key_BJTE, value_BJTE=value_BJTE))
        return self.attend(layer, query_BATE, key_BJTE, value_BJTE)

    def recur(self, layer: int, tokens: DeltaTokens, scan: DeltaScan) -> Tensor:
        start = None if self.before is None else self.before.state(layer)
        recurrence = self.form.recurrence
        output, state = recurrence(tokens, scan, start, after=[max(recurrence.place_of)])
        assert state is not None
        self.kept.setdefault(layer, state)
        return output


class PrefixCache:
    """What tokens need from the prefix before them: the record of each layer, and the last hidden states."""

    def __init__(self, kept: Mapping[int, LayerCache], states_PH: Tensor, before: "PrefixCache | None" = None):
        self.before = before
        self.own = {layer: _leaves(of_layer) for layer, of_layer in kept.items()}
        self.own_states_PH = _leaf(states_PH)
        outputs = [tensor for of_layer in kept.values() for tensor in _tensors(of_layer)]
        leaves = [tensor for of_layer in self.own.values() for tensor in _tensors(of_layer)]
        self._pairs = list(zip([*outputs, states_PH], [*leaves, self.own_states_PH], strict=True))

    @property
    def path(self) -> "list[PrefixCache]":
        """Return the passes from the outermost one to this one."""
        return [*([] if self.before is None else self.before.path), self]

    def keys_values(self, layer: int) -> list[KeysValues]:
        """Return a layer's keys and values along the path."""
        found = [each.own[layer] for each in self.path]
        return [each for each in found if isinstance(each, KeysValues)]

    def state(self, layer: int) -> DeltaState:
        """Return the state of a layer's delta net after the prefix."""
        found = self.own[layer]
        assert isinstance(found, DeltaState)
        return found

    def states(self) -> Tensor:
        """Return the last hidden states of all tokens along the path."""
        return torch.cat([each.own_states_PH for each in self.path])

    def backward(self) -> None:
        """Run the backward pass through the prefix with the gradients that the tokens after it have left here."""
        pairs = [(output, leaf.grad) for output, leaf in self._pairs if output.requires_grad and leaf.grad is not None]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])


class ContinuedAttention:
    """The computation of `form` after `prefix`: it attends to the prefix's keys and values and to those of the tokens
    after it, and starts from the prefix's states."""

    def __init__(self, form: PackedForm, prefix: PrefixCache):
        self.form = form
        self.prefix = prefix

    def __call__(self, layer: Layer, query_BASE: Tensor, key_BJSE: Tensor, value_BJSE: Tensor) -> Tensor:
        before = self.prefix.keys_values(layer.index)
        key_BJTE = torch.cat([*(each.key_BJTE for each in before), key_BJSE], dim=2)
        value_BJTE = torch.cat([*(each.value_BJTE for each in before), value_BJSE], dim=2)
        return self.form(layer, query_BASE, key_BJTE, value_BJTE)

    def recur(self, layer: int, tokens: DeltaTokens, scan: DeltaScan) -> Tensor:
        return self.form.recurrence(tokens, scan, self.prefix.state(layer))[0]


class RunsPrefixes(Protocol):
    """The part of a learner that runs prefixes."""

    def run_prefix(
        self, prefix: PackedTokens, features_KH: Tensor | None, before: PrefixCache | None = None
    ) -> PrefixCache: ...


class OpenPrefixes:
    """The passes over prefixes that are open while the microbatches of a unit run: the path to the one at hand.
    `features` computes the vision features (K, H) of pictures."""

    def __init__(
        self, unit: MicrobatchUnit, learner: RunsPrefixes, features: Callable[[tuple[EncodedImage, ...]], Tensor | None]
    ):
        self.unit = unit
        self.learner = learner
        self.features = features
        self.open: list[tuple[int, PrefixCache]] = []  # each with the number of the microbatch that closes it

    def before(self, number: int) -> PrefixCache | None:
        """Return the pass that a microbatch continues. Those that no later one continues are closed: the gradients that
        were left there go back through them."""
        self.close(number)
        for each in self.unit.opening(number):
            features_KH = self.features(each.packed.images)
            self.open.append((each.stop, self.learner.run_prefix(each.packed, features_KH, self._innermost)))
        return self._innermost

    def close(self, number: int) -> None:
        """Close the passes that no microbatch from `number` on continues."""
        while self.open and self.open[-1][0] <= number:
            self.open.pop()[1].backward()

    @property
    def _innermost(self) -> PrefixCache | None:
        return self.open[-1][1] if self.open else None


def _tensors(kept: LayerCache) -> list[Tensor]:
    return [getattr(kept, field.name) for field in fields(kept)]


def _leaves(kept: LayerCache) -> LayerCache:
    return type(kept)(**{field.name: _leaf(getattr(kept, field.name)) for field in fields(kept)})


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(torch.is_grad_enabled())
