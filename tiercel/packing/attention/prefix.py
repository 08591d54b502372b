"""A separate pass for a prefix, for trees that are too large for one microbatch.

The prefix is run once. What the tokens after it need is detached from the graph: keys and values, states of delta
nets, and the last hidden states. Every microbatch after it adds its gradients to them, and at the end one backward
pass through the prefix uses the sums. A prefix may continue another one, to which its own backward pass adds gradients
in the same way. The gradient equals that of the whole tree, up to rounding.

Shape suffixes: docs/shapes.md; B is 1 here.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tiercel.models.layers.attention import Layer
from tiercel.models.layers.delta_net import DeltaScan, DeltaState, DeltaTokens
from tiercel.packing.batch import Batch, MicrobatchUnit
from tiercel.packing.layout import PackedTokens
from tiercel.packing.recurrence import PackedForm
from tiercel.types import EncodedImage


@dataclass(frozen=True, kw_only=True, slots=True)
class KeysValues:
    """The keys and values of a layer with attention."""

    key_BJTE: Tensor
    value_BJTE: Tensor


LayerCache = KeysValues | DeltaState  # what later tokens need from a layer


class PrefixCache:
    """What tokens need from the prefix before them: the record of each layer, and the last hidden states."""

    def __init__(self, kept: Mapping[int, LayerCache], states_PH: Tensor, before: "PrefixCache | None" = None):
        self.before = before
        self._pairs: list[tuple[Tensor, Tensor]] = []  # each output with its leaf
        self.own = {layer: self._leaves(of_layer) for layer, of_layer in kept.items()}
        self.own_states_PH = self._leaf(states_PH)

    def _leaf(self, output: Tensor) -> Tensor:
        leaf = output.detach().requires_grad_(torch.is_grad_enabled())
        self._pairs.append((output, leaf))
        return leaf

    def _leaves(self, kept: LayerCache) -> LayerCache:
        return type(kept)(**{field.name: self._leaf(getattr(kept, field.name)) for field in fields(kept)})

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
    """The computation of `form` after the pass `prefix`, if there is one: it attends to the prefix's keys and values
    and to those of the tokens after it, and starts from the prefix's states. If `kept` is given, it receives
    what later tokens need from each layer."""

    def __init__(self, form: PackedForm, prefix: PrefixCache | None, kept: dict[int, LayerCache] | None = None):
        self.form = form
        self.prefix = prefix
        self.kept = kept

    def __call__(self, layer: Layer, query_BASE: Tensor, key_BJSE: Tensor, value_BJSE: Tensor) -> Tensor:
        if self.kept is not None:  # activation checkpointing calls this a second time
            self.kept.setdefault(layer.index, KeysValues(key_BJTE=key_BJSE, value_BJTE=value_BJSE))
        before = [] if self.prefix is None else self.prefix.keys_values(layer.index)
        if before:
            key_BJSE = torch.cat([*(each.key_BJTE for each in before), key_BJSE], dim=2)
            value_BJSE = torch.cat([*(each.value_BJTE for each in before), value_BJSE], dim=2)
        return self.form(layer, query_BASE, key_BJSE, value_BJSE)

    def recur(self, layer: int, tokens: DeltaTokens, scan: DeltaScan) -> Tensor:
        start = None if self.prefix is None else self.prefix.state(layer)
        recurrence = self.form.recurrence
        after = () if self.kept is None else (max(recurrence.place_of),)
        output, state = recurrence(tokens, scan, start, after)
        if self.kept is not None and state is not None:
            self.kept.setdefault(layer, state)
        return output


# Runs a prefix with its vision features (K, H), after the pass that it continues.
RunPrefix = Callable[[PackedTokens, Tensor | None, PrefixCache | None], PrefixCache]


def passes(
    unit: MicrobatchUnit[Batch],
    run_prefix: RunPrefix,
    features: Callable[[tuple[EncodedImage, ...]], Tensor | None],
    begin: Callable[[Batch], None] = lambda batch: None,
) -> Iterator[tuple[Batch, Tensor | None, PrefixCache | None]]:
    """Yield the microbatches of a unit, each with the vision features (K, H) of its pictures, which `features`
    computes, and the pass over the prefix that it continues. `begin` is called before the prefixes of a microbatch are
    run. Compute the gradient of each before asking for the next: the gradients that were
    left at a prefix go back through it after the last microbatch that continues it."""
    opened: list[tuple[int, PrefixCache]] = []  # the path to the innermost, each with the number of what closes it
    for number, batch in enumerate(unit.batches):
        begin(batch)
        innermost = opened[-1][1] if opened else None
        for each in unit.opening(number):
            innermost = run_prefix(each.packed, features(each.packed.images), innermost)
            opened.append((each.stop, innermost))
        yield batch, features(batch.packed.images), innermost
        while opened and opened[-1][0] == number + 1:
            opened.pop()[1].backward()
