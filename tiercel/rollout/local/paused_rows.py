"""Rows that leave a batch between two turns, and come back with what they observed. Shape suffixes: docs/shapes.md.

The generated tokens of all rows are right-aligned in the cache, so that every row appends its next token at the same
place. Shorter rows leave the first places unused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from tiercel.devices import moved
from tiercel.models.layers.attention import Layer, attended
from tiercel.models.layers.attention_span import AttentionSpan, seen_spans
from tiercel.models.layers.delta_net import DeltaScan, DeltaState, DeltaTokens
from tiercel.types import EncodedPrompt

KeysAndValues = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowState:
    """What the layers keep of a row besides its prompt."""

    prompt: int  # its number among those of the prefill
    position: int = 0  # of the next token; not known between two turns
    length: int = 0  # tokens after the prompt
    own: Mapping[int, KeysAndValues] = field(default_factory=dict)  # (J, L, E) each, by layer
    deltas: Mapping[int, DeltaState] = field(default_factory=dict)  # of one row, by layer


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumedTokens:
    """The tokens that a row has not run: the last of its turn, and what it observed."""

    state: RowState
    tokens: EncodedPrompt  # with their positions in the whole sequence, and their pictures


class RowMemory:
    """The cache of the rows' generated tokens: keys, values and states. Subclasses allocate it and attend to it."""

    prompt_lengths: Sequence[int]  # of all prompts of the prefill
    prompt_of: list[int]  # the prompt of each row
    length: int  # new tokens of the longest row
    unused: list[int]  # places before the first new token of each row
    states: dict[int, DeltaState]  # by layer

    def of_prompts(self, layer: int) -> KeysAndValues:
        """Return keys and values (B, J, P, E) of all prompts of the prefill."""
        raise NotImplementedError

    def own(self) -> Mapping[int, KeysAndValues]:
        """Return keys and values (R, J, L, E) of own tokens, by layer."""
        raise NotImplementedError

    def make_room(self, rows: int, tokens: int) -> None:
        """Allocate memory for this number of rows and of own tokens."""
        raise NotImplementedError

    def take(self, places: Sequence[int]) -> list[RowState]:
        """Copy what is kept of these rows."""
        return [self._state(place, slice(self.unused[place], self.length)) for place in places]

    def _state(self, place: int, used: slice) -> RowState:
        own = {
            layer: (keys[place, :, used].clone(), values[place, :, used].clone())
            for layer, (keys, values) in self.own().items()
        }
        here = slice(place, place + 1)
        deltas = {
            layer: DeltaState(recent=state.recent[here].clone(), memory_RAEE=state.memory_RAEE[here].clone())
            for layer, state in self.states.items()
        }
        return RowState(prompt=self.prompt_of[place], length=used.stop - used.start, own=own, deltas=deltas)

    def append(self, rows: Sequence[RowState]) -> None:
        """Put rows after the current ones. Afterwards all rows must be sorted by prompt."""
        present = len(self.prompt_of)
        lengths = [self.length - unused for unused in self.unused]
        used = max(lengths, default=0)
        newest = slice(self.length - used, self.length)
        lengths += [row.length for row in rows]
        self.length = max(lengths)
        self.make_room(len(lengths), self.length)
        own = self.own()
        for keys_and_values in own.values():
            for own_RJLE in keys_and_values:
                own_RJLE[:present, :, self.length - used : self.length] = own_RJLE[:present, :, newest].clone()
                own_RJLE[:present, :, : self.length - used] = 0.0  # what is not used must be finite
        for place, row in enumerate(rows, present):
            for layer, fresh in row.own.items():
                for own_RJLE, fresh_JLE in zip(own[layer], fresh, strict=True):
                    own_RJLE[place, :, self.length - row.length : self.length] = fresh_JLE
            for layer, state in row.deltas.items():
                self.states[layer].recent[place] = state.recent[0]
                self.states[layer].memory_RAEE[place] = state.memory_RAEE[0]
        self.prompt_of += [row.prompt for row in rows]
        self.unused = [self.length - length for length in lengths]


class ResumedAttention:
    """The attention of the new tokens of several rows, padded on the right: over the row's prompt, over its own tokens,
    and over each other. Layers with a state continue from the row's."""

    def __init__(self, memory: RowMemory, rows: Sequence[ResumedTokens], device: torch.device):
        self.memory = memory
        self.rows = rows
        self.device = device
        self.new_lengths = [len(row.tokens.token_ids_P) for row in rows]
        self.lengths_R = moved(torch.tensor(self.new_lengths), device)
        self.prompt_R = moved(torch.tensor([row.state.prompt for row in rows]), device)
        self.mask = cache(self._mask)
        self.fresh: dict[int, KeysAndValues] = {}  # of the new tokens, by layer
        self.deltas: dict[int, DeltaState] = {}

    def __call__(self, layer: Layer, query_RATE: Tensor, key_RJTE: Tensor, value_RJTE: Tensor) -> Tensor:
        self.fresh[layer.index] = key_RJTE, value_RJTE
        key, value = (self._all_tokens(layer.index, number) for number in range(2))
        mask = self.mask(layer.attention_span, key.shape[2])
        return attended(query_RATE, key, value, layer, mask)

    def recur(self, layer: int, tokens: DeltaTokens, scan: DeltaScan) -> Tensor:
        order_T = torch.arange(tokens.rate_RTA.shape[1], device=self.device)
        start = DeltaState.joined([row.state.deltas[layer] for row in self.rows])
        output, self.deltas[layer] = scan(tokens.without(order_T >= self.lengths_R[:, None]), self.lengths_R, start)
        return output

    def states(self) -> list[RowState]:
        """Return the rows with the new tokens."""
        return [self._state(number) for number in range(len(self.rows))]

    def _state(self, number: int) -> RowState:
        before, new = self.rows[number].state, self.new_lengths[number]
        own = {}
        for layer, (old_keys, old_values) in before.own.items():
            fresh_keys, fresh_values = (fresh[number, :, :new] for fresh in self.fresh[layer])
            own[layer] = torch.cat([old_keys, fresh_keys], dim=1), torch.cat([old_values, fresh_values], dim=1)
        last = moved(torch.tensor([number]), self.device)
        deltas = {layer: state.of(last) for layer, state in self.deltas.items()}
        position = int(self.rows[number].tokens.positions_DP.max()) + 1
        return RowState(prompt=before.prompt, position=position, length=before.length + new, own=own, deltas=deltas)

    def _all_tokens(self, layer: int, number: int) -> Tensor:
        """Return the keys (`number` 0) or values (1) of each row: prompt, own tokens, new tokens, each part padded."""
        own = [row.state.own[layer][number].transpose(0, 1) for row in self.rows]
        own_RJLE = torch.nn.utils.rnn.pad_sequence(own, batch_first=True).transpose(1, 2)
        of_prompts = self.memory.of_prompts(layer)[number]
        return torch.cat([of_prompts[self.prompt_R], own_RJLE, self.fresh[layer][number]], dim=2)

    def _mask(self, attention_span: AttentionSpan, tokens: int) -> Tensor:
        """Return the mask, bool (R, 1, T, all tokens)."""
        new, own = max(self.new_lengths), max(row.state.length for row in self.rows)
        order_P, order_L, order_T = torch.arange(tokens - own - new), torch.arange(own), torch.arange(new)
        masks = []
        for row in self.rows:
            prompt = self.memory.prompt_lengths[row.state.prompt]
            before = prompt + row.state.length
            spans = [(before + start, before + stop) for start, stop in row.tokens.picture_spans]
            start_T, stop_T = (each[before:, None] for each in seen_spans(attention_span, before + new, spans))
            places = [order_P.where(order_P < prompt, -1), (order_L + prompt).where(order_L < row.state.length, -1)]
            order = torch.cat([*places, order_T + before])  # in the row's sequence; -1: padding
            masks.append((order >= start_T) & (order < stop_T))
        return moved(torch.stack(masks)[:, None], self.device)
