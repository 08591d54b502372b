"""Attention of one new token in every row on a CPU. What several rows begin with is read once for all of them: a
picture for its questions, a prompt for its group.

The prompts are a tree. Its nodes on one level are a batch of keys and values, and all rows below a node are queries of
one attention. A row's results on all levels and over its own tokens are joined by their log-sum-exp. Shape suffixes:
docs/shapes.md. R are the rows that are being decoded; of a level, N are the nodes, P the places of the longest, and S
the slots, as many for each node as the largest number of rows below one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from tiercel.models.layers.attention import Layer
from tiercel.models.layers.delta_net import DeltaScan, DeltaState, DeltaTokens
from tiercel.packing.tree import PrefixTree
from tiercel.rollout.local.paused_rows import KeysAndValues, RowMemory

NOWHERE = -(2**40)
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, kw_only=True, slots=True)
class _Level:
    """Nodes that have the same number of ancestors."""

    numbers: tuple[int, ...]  # in the tree
    lengths: tuple[int, ...]
    depths: tuple[int, ...]  # tokens before each node
    held: dict[int, KeysAndValues] = field(default_factory=dict)  # (N, J, P, E) each, by layer

    def only(self, numbers: tuple[int, ...]) -> "_Level":
        """Select nodes."""
        if numbers == self.numbers:
            return self
        places = [self.numbers.index(number) for number in numbers]
        lengths, depths = (tuple(each[place] for place in places) for each in (self.lengths, self.depths))
        longest = max(lengths, default=0)
        held = {
            layer: (keys[places, :, :longest], values[places, :, :longest])
            for layer, (keys, values) in self.held.items()
        }
        return _Level(numbers=numbers, lengths=lengths, depths=depths, held=held)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slots:
    """The places of the rows below the nodes of a level. A row without a node there has the slot after the last."""

    most: int  # rows below the node that has most of them
    slots_R: Tensor | None  # the slot of each row; None: every slot has a row, in order
    ends_R: Tensor  # the tokens from the start of its prompt to the end of its node; far below 0 without a node


class DecodeAttention(RowMemory):
    """The attention of one new token in every row. The prompt number i ends with the node `ends[i]` of the tree."""

    def __init__(
        self, tree: PrefixTree, ends: Sequence[int], group_size: int, max_new_tokens: int, rows_return: bool = False
    ):
        self.paths = [tree.path(end) for end in ends]
        self.levels = [
            _Level(
                numbers=tuple(numbers),
                lengths=tuple(tree.length_to(number) - tree.depths[number] for number in numbers),
                depths=tuple(tree.depths[number] for number in numbers),
            )
            for numbers in tree.levels
        ]
        self.all_levels = self.levels if rows_return else None  # rows of any prompt may come back
        self.prompt_lengths = [tree.length_to(end) for end in ends]
        self.prompt_of = [prompt for prompt in range(len(ends)) for _ in range(group_size)]  # by row
        self.max_new_tokens = max_new_tokens
        self.length = 0
        self.unused = [0] * len(self.prompt_of)
        self.own_tokens: dict[int, KeysAndValues] = {}  # by layer
        self.states: dict[int, DeltaState] = {}
        # What each row sees of a level (by its number, and by window), and of its own tokens: for the current token.
        self.sights: dict[tuple[int, int | None], tuple[Tensor | None, Tensor | None]] = {}
        self.own_biases: dict[int | None, Tensor | None] = {}

    def of_prompts(self, layer: int) -> KeysAndValues:
        nodes = {
            number: [each[place, :, :length].transpose(0, 1) for each in level.held[layer]]
            for level in self.all_levels or self.levels
            for place, (number, length) in enumerate(zip(level.numbers, level.lengths, strict=True))
        }
        keys, values = (
            pad_sequence([torch.cat([nodes[number][side] for number in path]) for path in self.paths], batch_first=True)
            for side in range(2)
        )
        return keys.transpose(1, 2), values.transpose(1, 2)

    def put(self, layer: int, key_BJPE: Tensor, value_BJPE: Tensor) -> None:
        self.put_levels(layer, [(key_BJPE, value_BJPE)])

    def put_levels(self, layer: int, held: Sequence[KeysAndValues]) -> None:
        """Keep the keys and values (N, J, P, E) of the nodes of each level."""
        for level, of_level in zip(self.levels, held, strict=True):
            level.held[layer] = of_level
        key_NJPE = held[0][0]
        own_key = key_NJPE.new_empty(len(self.prompt_of), key_NJPE.shape[1], self.max_new_tokens, key_NJPE.shape[3])
        self.own_tokens[layer] = own_key, torch.empty_like(own_key)

    def put_state(self, layer: int, state: DeltaState) -> None:
        self.states[layer] = state.of(torch.tensor(self.prompt_of))

    def keep(self, kept: Sequence[int]) -> None:
        """Keep only these rows, and what of the prompts they begin with."""
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
        """Compute the slot of each row on each level, after the prefill and whenever rows have been removed or
        added."""
        paths = [self.paths[prompt] for prompt in self.prompt_of]
        self.levels = [
            level.only(tuple(sorted({path[depth] for path in paths if len(path) > depth})))
            for depth, level in enumerate(self.all_levels or self.levels)
            if any(len(path) > depth for path in paths)
        ]
        self.slots = [_slots(level, depth, paths) for depth, level in enumerate(self.levels)]
        self.lengths_R = torch.tensor([self.prompt_lengths[prompt] for prompt in self.prompt_of], dtype=torch.int64)
        self.unused_R = torch.tensor(self.unused, dtype=torch.int64)
        self.sights.clear()
        self.own_biases.clear()

    def add_token(self) -> None:
        """Advance to the next new token of every row."""
        self.length += 1
        self.sights = {key: sight for key, sight in self.sights.items() if key[1] is None}
        self.own_biases.clear()

    def _sight(self, number: int, window: int | None, queries: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the bias of the scores on a level, (N, 1, 1, P), or (N, 1, queries of all slots, P) with a window:
        -inf for padding, and for what is before the window; None if every token is seen. Also return which rows (R,)
        see nothing there; None without a window."""
        if (number, window) not in self.sights:
            level, slots = self.levels[number], self.slots[number]
            key = next(iter(level.held.values()))[0]
            order_P, is_blind_R = torch.arange(key.shape[2]), None
            sees_NSP = order_P < torch.tensor(level.lengths)[:, None, None]
            if window is not None:
                before_R = self.lengths_R + self.length - self.unused_R - window
                is_blind_R = before_R >= slots.ends_R - 1
                before_S = self._in_slots(number, before_R)
                before_NS1 = before_S.view(-1, slots.most, 1, 1).expand(-1, -1, queries, 1).flatten(1, 2)
                sees_NSP = sees_NSP & (order_P + torch.tensor(level.depths)[:, None, None] > before_NS1)
            bias_NSP = torch.zeros_like(sees_NSP, dtype=key.dtype).masked_fill(~sees_NSP, -torch.inf)
            self.sights[number, window] = None if bool(sees_NSP.all()) else bias_NSP[:, None], is_blind_R
        return self.sights[number, window]

    def _in_slots(self, number: int, values_R: Tensor) -> Tensor:
        """Put values of the rows into the slots of a level; 0 where no row is."""
        slots, nodes = self.slots[number], len(self.levels[number].numbers)
        if slots.slots_R is None:
            return values_R
        values_S = values_R.new_zeros(nodes * slots.most + 1, *values_R.shape[1:])
        return values_S.index_copy(0, slots.slots_R, values_R)[:-1]

    def _own_bias(self, window: int | None, first: int) -> Tensor | None:
        """Return the bias (R, 1, 1, L) of a new token's scores with its row's tokens from place `first` on: -inf for
        unused places."""
        if not any(self.unused):
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
        found, lse = self.over_own(layer, query_RJQE, key_RJ1E, value_RJ1E)
        for number in range(len(self.levels)):
            of_level = self._over_level(number, layer, query_RJQE)
            if of_level is not None:
                output_RJQE, lse_RJQ = of_level
                weight_RJQ1 = torch.sigmoid(lse - lse_RJQ)[..., None].to(found.dtype)
                found = torch.lerp(output_RJQE, found, weight_RJQ1)
                if number + 1 < len(self.levels):
                    lse = torch.logaddexp(lse, lse_RJQ)
        return found.reshape(rows, heads, 1, size)

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

    def _over_level(self, number: int, layer: Layer, query_RJQE: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return output and log-sum-exp of every row over its node on a level; None if the window begins after all
        nodes. All rows below a node are queries of one attention."""
        _, key_heads, queries, size = query_RJQE.shape
        bias, is_blind_R = self._sight(number, layer.attention_span.window, queries)
        if is_blind_R is not None and bool(is_blind_R.all()):
            return None
        level, slots = self.levels[number], self.slots[number]
        nodes, most = len(level.numbers), slots.most
        query = self._in_slots(number, query_RJQE).view(nodes, most, key_heads, queries, size).transpose(1, 2)
        query = query.reshape(nodes, key_heads, most * queries, size)
        output, lse = attention(query, *level.held[layer.index], bias, layer.scale)
        output = output.view(nodes, key_heads, most, queries, size).transpose(1, 2).flatten(0, 1)
        lse = lse.view(nodes, key_heads, most, queries).transpose(1, 2).flatten(0, 1)
        if slots.slots_R is not None:
            output = pad(output, (0, 0, 0, 0, 0, 0, 0, 1))[slots.slots_R]
            lse = pad(lse, (0, 0, 0, 0, 0, 1), value=-torch.inf)[slots.slots_R]
        return output, lse if is_blind_R is None else lse.masked_fill(is_blind_R[:, None, None], -torch.inf)


def _slots(level: _Level, depth: int, paths: Sequence[Sequence[int]]) -> _Slots:
    """Place rows, given by the paths to the ends of their prompts, below the nodes of the level `depth`."""
    places = [level.numbers.index(path[depth]) if len(path) > depth else len(level.numbers) for path in paths]
    most = max(Counter(place for place in places if place < len(level.numbers)).values(), default=0)
    last = most * len(level.numbers)
    slots = [min(slot, last) for slot in slots_of(places, most)]
    ends = [*(depth + length for depth, length in zip(level.depths, level.lengths, strict=True)), NOWHERE]
    return _Slots(
        most=most,
        slots_R=None if slots == list(range(last)) else torch.tensor(slots),
        ends_R=torch.tensor([ends[place] for place in places]),
    )


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
