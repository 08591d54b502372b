"""Prefill of a batch of prompts: side by side with padding, or, on a CPU and if they begin alike, as a tree in which
what they share is run once, such as the picture of several questions.

Shape suffixes: docs/shapes.md. B are the prompts of a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tiercel.devices import moved
from tiercel.models.families.base import Family
from tiercel.models.layers.attention import Layer, attended
from tiercel.models.layers.attention_span import AttentionSpan, Span, sequence_masks
from tiercel.models.layers.delta_net import DeltaScan, DeltaState, DeltaTokens
from tiercel.packing.attention.split_and_dense import SplitAttention
from tiercel.packing.layout import PackedTokens, PackItem, pack
from tiercel.packing.recurrence import PackedForm
from tiercel.packing.tree import PrefixTree
from tiercel.rollout.local.attention import DecodeAttention
from tiercel.types import EncodedPrompt

SHORTEST_LEVEL = 64  # tokens of a node whose keys are read once for all below it; for 16, one more level costs more

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedPrompts:
    """The prompts of a batch, padded on the right."""

    embeddings_BPH: Tensor
    positions: Tensor  # (D, B, P), or (B, P) if D is 1, as in transformers
    lengths: tuple[int, ...]
    lengths_B: Tensor  # the same on the device
    starts_B: Tensor  # first position after each prompt
    picture_spans: tuple[tuple[Span, ...], ...]  # of each prompt

    def mask(self, attention_span: AttentionSpan) -> Tensor | None:
        """Return the mask, bool (B, 1, P, P); None if it is causal. Padding comes last, so that no real token sees
        it."""
        length = self.embeddings_BPH.shape[1]
        attention_span = attention_span.within(length, [span for of_prompt in self.picture_spans for span in of_prompt])
        return (
            None
            if attention_span.is_causal
            else moved(sequence_masks(attention_span, length, self.picture_spans), self.starts_B.device)
        )


def starts_after(prompts: Sequence[EncodedPrompt]) -> list[int]:
    """Return the first position after each prompt."""
    return [int(prompt.positions_DP.max()) + 1 for prompt in prompts]


class PromptStore(Protocol):
    """A store of what the layers make of the prompts."""

    def put(self, layer: int, key_BJPE: Tensor, value_BJPE: Tensor) -> None:
        """Keep the keys and values of a layer."""

    def put_state(self, layer: int, state: DeltaState) -> None:
        """Keep the state of a layer after each prompt."""


class PrefillAttention:
    """The attention of padded prompts, and the recurrence of layers with a state."""

    def __init__(self, store: PromptStore, prompts: PaddedPrompts):
        self.store = store
        self.lengths_B = prompts.lengths_B
        self.mask = cache(prompts.mask)

    def recur(self, layer: int, tokens: DeltaTokens, scan: DeltaScan) -> Tensor:
        order_P = torch.arange(tokens.rate_RTA.shape[1], device=self.lengths_B.device)
        is_padding_BP = order_P >= self.lengths_B[:, None]
        output, state = scan(tokens.without(is_padding_BP), self.lengths_B)
        self.store.put_state(layer, state)
        return output

    def __call__(self, layer: Layer, query_BATE: Tensor, key_BJTE: Tensor, value_BJTE: Tensor) -> Tensor:
        self.store.put(layer.index, key_BJTE, value_BJTE)
        mask = self.mask(layer.attention_span)
        return attended(query_BATE, key_BJTE, value_BJTE, layer, mask, is_causal=mask is None)


@dataclass(frozen=True)
class PromptTree:
    """The prompts of a batch, with what they share once."""

    laid: PackedTokens

    @property
    def ends(self) -> tuple[int, ...]:
        """Return the number of the node with which each prompt ends."""
        return self.laid.ends_C

    @cached_property
    def decoded(self) -> "DecodedTree":
        """The tree that is read for each new token."""
        return without_short_nodes(self.laid.tree, self.ends, SHORTEST_LEVEL)

    @property
    def lasts_B(self) -> Tensor:
        """Return the place of each prompt's last token."""
        return torch.tensor([self.laid.tree.nodes[end].span[1] - 1 for end in self.ends])


@dataclass(frozen=True)
class DecodedTree:
    """A tree whose levels are worth an attention each, made of another one's tokens."""

    tree: PrefixTree
    ends: tuple[int, ...]  # the number of the node with which each sequence ends
    places: Sequence[Tensor]  # of each node's tokens in the other tree

    @cached_property
    def places_of_levels(self) -> list[Tensor]:
        """For each level, the places of its nodes' tokens (N, P), padded on the right with place 0."""
        return [pad_sequence([self.places[number] for number in level], batch_first=True) for level in self.tree.levels]


def without_short_nodes(tree: PrefixTree, ends: Sequence[int], shortest: int) -> DecodedTree:
    """Make each node of fewer than `shortest` tokens a part of each of its children, unless a sequence ends with it.
    Reading its keys several times costs less than one more level of attention."""
    groups: list[list[int]] = []
    short: dict[int | None, list[int]] = {}  # the nodes that were left out, with such above them
    parents = {node.parent for node in tree.nodes}
    for number, node in enumerate(tree.nodes):
        group = [*short.get(node.parent, ()), number]
        is_short = sum(tree.nodes[each].size for each in group) < shortest
        if is_short and number in parents and number not in ends:
            short[number] = group
        else:
            groups.append(group)
    decoded, places = tree.regrouped(groups)
    number_of = {group[-1]: number for number, group in enumerate(groups)}
    return DecodedTree(tree=decoded, ends=tuple(number_of[end] for end in ends), places=places)


def prompt_tree(prompts: Sequence[EncodedPrompt], family: Family) -> PromptTree | None:
    """Join prompts; None if they share nothing."""
    laid = pack([PackItem.of_prompt(prompt) for prompt in prompts], family)
    return None if laid.tree.length == laid.repeated_length else PromptTree(laid)


class TreePrefill:
    """The attention and the recurrence of a tree of prompts on a CPU. `store` gets what the layers make of the nodes of
    each level, and the state after each prompt."""

    def __init__(self, store: DecodeAttention, prompts: PromptTree):
        self.store = store
        self.prompts = prompts
        self.levels = prompts.decoded.places_of_levels
        tree = prompts.laid.tree
        self.form = PackedForm(SplitAttention(tree, CPU), tree, CPU)

    def __call__(self, layer: Layer, query_1ATE: Tensor, key_1JTE: Tensor, value_1JTE: Tensor) -> Tensor:
        def of_nodes(each_1JTE: Tensor, places_NP: Tensor) -> Tensor:
            return each_1JTE[0, :, places_NP].transpose(0, 1).contiguous()

        held = [(of_nodes(key_1JTE, places_NP), of_nodes(value_1JTE, places_NP)) for places_NP in self.levels]
        self.store.put_levels(layer.index, held)
        return self.form(layer, query_1ATE, key_1JTE, value_1JTE)

    def recur(self, layer: int, tokens: DeltaTokens, scan: DeltaScan) -> Tensor:
        output, state = self.form.recurrence(tokens, scan, after=self.prompts.ends)
        assert isinstance(state, DeltaState)
        self.store.put_state(layer, state)
        return output
