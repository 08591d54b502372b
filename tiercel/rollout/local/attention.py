"""Attention of one new token in every row on a CPU, reading a prompt's keys and values once for all its rows.

Shape suffixes: docs/shapes.md. B are prompts, R the rows that are being decoded.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from tiercel.models.layers.attention import Layer
from tiercel.models.layers.delta_net import DeltaScan, DeltaState, DeltaTokens
from tiercel.rollout.local.paused_rows import KeysAndValues, RowMemory

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, kw_only=True, slots=True)
class _Prompts:
    """The keys and values of prompts."""

    numbers: tuple[int, ...]  # among those of the prefill
    lengths: list[int]
    keys: dict[int, Tensor]  # (B, J, P, E), by layer
    values: dict[int, Tensor]

    def only(self, numbers: tuple[int, ...]) -> "_Prompts":
        """Select prompts."""
        if numbers == self.numbers:
            return self
        places = [self.numbers.index(number) for number in numbers]
        lengths = [self.lengths[place] for place in places]
        longest = max(lengths, default=0)
        keys, values = (
            {layer: tensor[places, :, :longest] for layer, tensor in held.items()} for held in (self.keys, self.values)
        )
        return _Prompts(numbers=numbers, lengths=lengths, keys=keys, values=values)


class DecodeAttention(RowMemory):
    """The attention of one new token in every row: over its prompt, in one product for all rows of the prompt, and over
    the row's own new tokens. The two results are joined by their log-sum-exp. `lengths` are the prompts'."""

    def __init__(self, lengths: Sequence[int], group_size: int, max_new_tokens: int, rows_return: bool = False):
        self.prompts = _Prompts(numbers=tuple(range(len(lengths))), lengths=list(lengths), keys={}, values={})
        self.all_prompts = self.prompts if rows_return else None  # rows of any prompt may come back
        self.prompt_lengths = lengths
        self.prompt_of = [prompt for prompt in range(len(lengths)) for _ in range(group_size)]  # by row
        self.max_new_tokens = max_new_tokens
        self.length = 0
        self.unused = [0] * len(self.prompt_of)
        self.own_tokens: dict[int, KeysAndValues] = {}  # by layer
        self.states: dict[int, DeltaState] = {}
        self.biases: dict[int | None, Tensor | None] = {}  # by window, for the current token
        self.own_biases: dict[int | None, Tensor | None] = {}

    def of_prompts(self, layer: int) -> KeysAndValues:
        held = self.all_prompts or self.prompts
        return held.keys[layer], held.values[layer]

    def put(self, layer: int, key_BJPE: Tensor, value_BJPE: Tensor) -> None:
        self.prompts.keys[layer], self.prompts.values[layer] = key_BJPE, value_BJPE
        _, heads, _, size = key_BJPE.shape
        own_key = key_BJPE.new_empty(len(self.prompt_of), heads, self.max_new_tokens, size)
        self.own_tokens[layer] = own_key, torch.empty_like(own_key)

    def put_state(self, layer: int, state: DeltaState) -> None:
        self.states[layer] = state.of(torch.tensor(self.prompt_of))

    def keep(self, kept: Sequence[int]) -> None:
        """Keep only these rows, and the prompts that still have rows."""
        kept_R = torch.tensor(kept, dtype=torch.int64)
        for layer, memories in self.own_tokens.items():
            key, value = (own.new_empty(len(kept), *own.shape[1:]) for own in memories)
            for fresh, own in zip((key, value), memories, strict=True):
                fresh[:, :, : self.length] = own[kept_R, :, : self.length]
            self.own_tokens[layer] = key, value
        self.states = {layer: state.of(kept_R) for layer, state in self.states.items()}
        self.prompt_of = [self.prompt_of[row] for row in kept]
        self.unused = [self.unused[row] for row in kept]
        self.arrange()

    def own(self) -> Mapping[int, KeysAndValues]:
        return self.own_tokens

    def make_room(self, rows: int, tokens: int) -> None:
        """Allocate memory for more rows, and for a turn after `tokens`."""
        for layer, (key, value) in self.own_tokens.items():
            added = max(0, tokens + self.max_new_tokens - key.shape[2])
            to_add = (0, 0, 0, added, 0, 0, 0, rows - len(key))
            self.own_tokens[layer] = pad(key, to_add), pad(value, to_add)
        for layer, state in self.states.items():
            added = rows - len(state.recent)
            self.states[layer] = DeltaState(
                recent=pad(state.recent, (0, 0, 0, 0, 0, added)),
                memory_RAEE=pad(state.memory_RAEE, (0, 0, 0, 0, 0, 0, 0, added)),
            )

    def arrange(self) -> None:
        """Compute the place of each row among the rows of its prompt, after the prefill and whenever rows have been
        removed or added."""
        self.prompts = (self.all_prompts or self.prompts).only(tuple(sorted(set(self.prompt_of))))
        place_of = {number: place for place, number in enumerate(self.prompts.numbers)}
        self.most = max(Counter(self.prompt_of).values(), default=0)  # rows of the prompt that has most of them
        slots = slots_of([place_of[number] for number in self.prompt_of], self.most)
        is_full = len(slots) == self.most * len(self.prompts.lengths)
        self.slots_R = None if is_full else torch.tensor(slots)
        self.most_unused = max(self.unused, default=0)
        self.unused_R = torch.tensor(self.unused) if self.most_unused else None
        self.biases.clear()
        self.own_biases.clear()

    def add_token(self) -> None:
        """Advance to the next new token of every row."""
        self.length += 1
        self.biases = {window: bias for window, bias in self.biases.items() if window is None}
        self.own_biases.clear()

    def _bias(self, window: int | None, queries: int) -> Tensor | None:
        """Return the bias of a new token's scores with its prompt, (B, 1, 1, P), or (B, 1, queries of all rows, P) if
        rows see different parts: -inf for padding, and for what is before the window. None if every token is seen."""
        if window not in self.biases:
            key = next(iter(self.prompts.keys.values()))
            order_P, lengths_B11 = torch.arange(key.shape[2]), torch.tensor(self.prompts.lengths)[:, None, None]
            sees_BMP = order_P < lengths_B11
            if window is not None:
                sees_BMP = sees_BMP & (order_P > lengths_B11 + self._slot_lengths(queries) - window)
            bias_BMP = torch.zeros_like(sees_BMP, dtype=key.dtype).masked_fill(~sees_BMP, -torch.inf)
            self.biases[window] = None if bool(sees_BMP.all()) else bias_BMP[:, None]
        return self.biases[window]

    def _slot_lengths(self, queries: int) -> Tensor | int:
        """Return the new tokens (B, queries of all rows, 1) of the row that has each query."""
        if self.unused_R is None:
            return self.length
        prompts = len(self.prompts.lengths)
        slots = self.unused_R
        if self.slots_R is not None:
            slots = torch.zeros(prompts * self.most, dtype=torch.int64).index_copy(0, self.slots_R, self.unused_R)
        return self.length - slots.view(prompts, self.most, 1, 1).expand(-1, -1, queries, 1).flatten(1, 2)

    def _own_bias(self, window: int | None, first: int) -> Tensor | None:
        """Return the bias (R, 1, 1, L) of a new token's scores with its row's tokens from place `first` on: -inf for
        unused places."""
        if self.unused_R is None:
            return None
        if window not in self.own_biases:
            is_unused_RL = torch.arange(first, self.length + 1) < self.unused_R[:, None]
            key = next(iter(self.own_tokens.values()))[0]
            bias_RL = torch.zeros_like(is_unused_RL, dtype=key.dtype).masked_fill(is_unused_RL, -torch.inf)
            self.own_biases[window] = bias_RL[:, None, None]
        return self.own_biases[window]

    def __call__(self, layer: Layer, query_RA1E: Tensor, key_RJ1E: Tensor, value_RJ1E: Tensor) -> Tensor:
        rows, heads, _, size = query_RA1E.shape
        query_RJQE = query_RA1E.view(rows, key_RJ1E.shape[1], -1, size)
        own_RJQE, own_lse_RJQ = self.over_own(layer, query_RJQE, key_RJ1E, value_RJ1E)
        window = layer.attention_span.window
        if window is not None and self.length - self.most_unused >= window - 1:  # the window begins after the prompts
            return own_RJQE.reshape(rows, heads, 1, size)
        prompt_RJQE, prompt_lse_RJQ = self._over_prompts(layer, query_RJQE)
        if window is not None and self.unused_R is not None:
            sees_no_prompt_R = self.length - self.unused_R >= window - 1
            prompt_lse_RJQ = prompt_lse_RJQ.masked_fill(sees_no_prompt_R[:, None, None], -torch.inf)
        weight_RJQ1 = torch.sigmoid(own_lse_RJQ - prompt_lse_RJQ)[..., None].to(own_RJQE.dtype)
        return torch.lerp(prompt_RJQE, own_RJQE, weight_RJQ1).reshape(rows, heads, 1, size)

    def recur(self, layer: int, tokens: DeltaTokens, scan: DeltaScan) -> Tensor:
        return scan.step(tokens, self.states[layer])

    def over_own(self, layer: Layer, query_RJQE: Tensor, key_RJ1E: Tensor, value_RJ1E: Tensor) -> tuple[Tensor, Tensor]:
        """Store the key and value of the new token. Returns output and log-sum-exp of every row over its own tokens."""
        own_key, own_value = self.own_tokens[layer.index]
        own_key[:, :, self.length] = key_RJ1E[:, :, 0]
        own_value[:, :, self.length] = value_RJ1E[:, :, 0]
        window = layer.attention_span.window
        first = 0 if window is None else max(0, self.length + 1 - window)
        seen = slice(first, self.length + 1)
        bias = self._own_bias(window, first)
        return attention(query_RJQE, own_key[:, :, seen], own_value[:, :, seen], bias, layer.scale)

    def _over_prompts(self, layer: Layer, query_RJQE: Tensor) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp of every row over its prompt. All rows of a prompt are queries of one
        attention."""
        _, key_heads, queries, size = query_RJQE.shape
        prompts = len(self.prompts.lengths)
        slots = query_RJQE
        if self.slots_R is not None:
            slots = query_RJQE.new_zeros(prompts * self.most, key_heads, queries, size)
            slots[self.slots_R] = query_RJQE
        query = slots.view(prompts, self.most, key_heads, queries, size).transpose(1, 2)
        output, lse = attention(
            query.reshape(prompts, key_heads, self.most * queries, size),
            self.prompts.keys[layer.index],
            self.prompts.values[layer.index],
            self._bias(layer.attention_span.window, queries),
            layer.scale,
        )
        output = output.view(prompts, key_heads, self.most, queries, size).transpose(1, 2).flatten(0, 1)
        lse = lse.view(prompts, key_heads, self.most, queries).transpose(1, 2).flatten(0, 1)
        return (output, lse) if self.slots_R is None else (output[self.slots_R], lse[self.slots_R])


def attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Compute attention with `bias` added to the scores. Returns output (..., queries, E) and log-sum-exp (...,
    queries)."""
    if bias is not None:
        bias = bias.expand(query.shape[0], 1, query.shape[2], key.shape[2])
    output, lse = _flash(query, key, value, 0.0, False, attn_mask=bias, scale=scale)
    return output.contiguous(), lse.contiguous()


def slots_of(prompt_of: Sequence[int], most: int) -> list[int]:
    """Return the place of each row if every prompt has `most` places. `prompt_of` is the prompt of each row."""
    taken: Counter[int] = Counter()
    slots = []
    for prompt in prompt_of:
        slots.append(prompt * most + taken[prompt])
        taken[prompt] += 1
    return slots
