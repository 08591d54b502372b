"""Keys, values and states of the rows that an accelerator decodes, in memory that is kept from batch to batch.

All tensors keep their addresses while batches fit, so a captured graph stays valid for the next batch. Shape suffixes:
docs/shapes.md. B are prompts, R the rows that are being decoded.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from tiercel.devices import moved
from tiercel.models.layers.attention import Layer
from tiercel.models.layers.delta_net import DeltaScan, DeltaState, DeltaTokens
from tiercel.rollout.local.attention import slots_of
from tiercel.rollout.local.attention_kernels import CachePlaces, Kernel, kernel_for
from tiercel.rollout.local.paused_rows import KeysAndValues, RowMemory

PROMPT_STEP = 256  # tokens: prompts that are a little longer than those before them still fit


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSize:
    """The size of a batch, or of memory for batches."""

    prompts: int
    prompt_tokens: int
    group_size: int
    new_tokens: int  # places for a row's own tokens

    @property
    def rows(self) -> int:
        return self.prompts * self.group_size

    def holds(self, other: "BatchSize") -> bool:
        """Return whether a batch of that size has room here."""
        return (
            self.prompts >= other.prompts
            and self.prompt_tokens >= other.prompt_tokens
            and self.group_size >= other.group_size
            and self.new_tokens >= other.new_tokens
        )

    def rounded(self) -> "BatchSize":
        """Return room for prompts that are a little longer."""
        tokens = -(-self.prompt_tokens // PROMPT_STEP) * PROMPT_STEP
        return replace(self, prompt_tokens=tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layer:
    """The keys and values of a layer."""

    kernel: Kernel
    prompts: KeysAndValues  # (B, J, P, E) each
    own: KeysAndValues  # (R, J, L, E) each


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerAttention:
    """The attention of one new token in every row, in one layer: over its prompt and over its own new tokens, joined by
    their log-sum-exp. All that it reads is here, so that a compiled layer can contain it."""

    kernel: Kernel
    prompts: KeysAndValues  # (B, J, P, E) each
    own: KeysAndValues  # (R, J, L, E) each
    places: CachePlaces
    newest_1: Tensor

    def __call__(self, scale: float, query_RA1E: Tensor, key_RJ1E: Tensor, value_RJ1E: Tensor) -> Tensor:
        rows, heads, _, size = query_RA1E.shape
        for memory, new in zip(self.own, (key_RJ1E, value_RJ1E), strict=True):
            self.kernel.put(memory, self.newest_1, new)
        query_RJQE = query_RA1E.reshape(rows, key_RJ1E.shape[1], -1, size)
        own_RJQE, own_lse_RJQ = self.kernel.over_own(query_RJQE, *self.own, self.places, scale)
        prompt_RJQE, prompt_lse_RJQ = self.kernel.over_prompts(query_RJQE, *self.prompts, self.places, scale)
        weight_RJQ1 = torch.sigmoid(own_lse_RJQ - prompt_lse_RJQ)[..., None].to(own_RJQE.dtype)
        return torch.lerp(prompt_RJQE, own_RJQE, weight_RJQ1).reshape(rows, heads, 1, size)


class FixedMemory(RowMemory):
    """The memory of all layers. It is the form of attention of a step: one new token in every row."""

    def __init__(self, room: BatchSize, device: torch.device):
        self.room, self.device = room, device
        self.layers: dict[int, _Layer] = {}
        self.states: dict[int, DeltaState] = {}
        self.seen: dict[tuple[int, int, int | None], CachePlaces] = {}  # of the present step
        self.keeps_states = False  # steps change copies of the states
        prompt_order = torch.arange(room.prompts + 1, dtype=torch.int32, device=device)
        row_order = torch.arange(room.rows + 1, dtype=torch.int32, device=device)
        self.places = CachePlaces(
            group_size=room.group_size,
            lengths_B=torch.ones_like(prompt_order[1:]),
            bounds=torch.zeros_like(prompt_order),
            prompt_starts=prompt_order * room.prompt_tokens,
            slots_R=torch.zeros(room.rows, dtype=torch.int64, device=device),
            used_R=torch.zeros_like(row_order[1:]),
            row_order=row_order,
            own_starts=row_order * room.new_tokens,
        )
        self.newest_1 = torch.full((1,), -1, device=device)  # place of the newest token

    def begin(self, lengths: Sequence[int], group_size: int, turn_tokens: int | None = None) -> None:
        """Prepare for a new batch of prompts of these lengths. `turn_tokens` is the limit of a turn, if rows come
        back."""
        self.places = replace(self.places, are_ragged=turn_tokens is not None)
        self.turn_tokens = turn_tokens or 0
        self.prompt_lengths = lengths
        self.prompt_of = [prompt for prompt in range(len(lengths)) for _ in range(group_size)]  # by row
        self.length = 0
        self.unused = [0] * len(self.prompt_of)
        self.places.lengths_B[: len(lengths)] = self._moved(lengths)
        self._arrange()

    def put(self, layer: int, key_BJPE: Tensor, value_BJPE: Tensor) -> None:
        """Copy the prompts' keys and values into the memory, in the layout that the kernel reads."""
        if layer not in self.layers:
            self.layers[layer] = self._new_layer(key_BJPE)
        held, (prompts, _, tokens, _) = self.layers[layer], key_BJPE.shape
        for memory, new_BJPE in zip(held.prompts, (key_BJPE, value_BJPE), strict=True):
            memory[:prompts, :, :tokens] = new_BJPE

    def put_state(self, layer: int, state: DeltaState) -> None:
        of_rows = state.of(self._moved(self.prompt_of))
        if layer not in self.states:
            self.states[layer] = DeltaState(
                recent=of_rows.recent.new_zeros(self.room.rows, *of_rows.recent.shape[1:]),
                memory_RAEE=of_rows.memory_RAEE.new_zeros(self.room.rows, *of_rows.memory_RAEE.shape[1:]),
            )
        self._put_rows(self.states[layer], of_rows)

    def keep(self, kept: Sequence[int]) -> None:
        """Keep only these rows. They move to the front of the memory."""
        kept_R = self._moved(kept)
        for layer in self.layers.values():
            for own in layer.own:
                own[: len(kept), :, : self.length] = own[kept_R, :, : self.length]
        for state in self.states.values():
            self._put_rows(state, state.of(kept_R))
        self.prompt_of = [self.prompt_of[row] for row in kept]
        self.unused = [self.unused[row] for row in kept]
        self._arrange()

    def own(self) -> Mapping[int, KeysAndValues]:
        return {number: layer.own for number, layer in self.layers.items()}

    def make_room(self, rows: int, tokens: int) -> None:
        """Allocate larger memory if another turn after `tokens` might not fit. There is memory for all rows."""
        if tokens + self.turn_tokens <= self.room.new_tokens:
            return
        before = self.room.new_tokens
        self.room = replace(self.room, new_tokens=max(tokens + self.turn_tokens, 2 * before))
        for number, layer in self.layers.items():
            larger = [layer.kernel.memory(own, self.room.rows, self.room.new_tokens) for own in layer.own]
            for memory, own in zip(larger, layer.own, strict=True):
                memory[:, :, :before] = own
            self.layers[number] = replace(layer, own=(larger[0], larger[1]))

    def of_prompts(self, layer: int) -> KeysAndValues:
        return self.layers[layer].prompts

    def add_token(self) -> None:
        """Start using one more token of every row."""
        self.newest_1 += 1
        self.places.used_R.add_(1)
        self.seen.clear()

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Undo at the end what steps inside the context change, except for the keys and values of the newest token,
        which the next step overwrites. Each layer's states are copied only for its own part of a step, because those of
        all layers may be gigabytes."""
        counters = (self.newest_1, self.places.used_R)
        before = [tensor.clone() for tensor in counters]
        self.keeps_states = True
        try:
            yield
        finally:
            self.keeps_states = False
            for tensor, value in zip(counters, before, strict=True):
                tensor.copy_(value)

    @property
    def held_bytes(self) -> int:
        tensors = [each for layer in self.layers.values() for each in (*layer.prompts, *layer.own)]
        states = [each for state in self.states.values() for each in (state.recent, state.memory_RAEE)]
        return sum(tensor.nbytes for tensor in (*tensors, *states, self.newest_1, self.places.used_R))

    def __call__(self, layer: Layer, query_RA1E: Tensor, key_RJ1E: Tensor, value_RJ1E: Tensor) -> Tensor:
        rows, heads = query_RA1E.shape[:2]
        attention = self.of_layer(layer.index, rows, heads, layer.attention_span.window)
        return attention(layer.scale, query_RA1E, key_RJ1E, value_RJ1E)

    def of_layer(self, number: int, rows: int, heads: int, window: int | None) -> LayerAttention:
        """Return the attention of the first rows in a layer with so many query heads. Layers that are alike have the
        same places."""
        held = self.layers[number]
        queries = heads // held.prompts[0].shape[1]
        if (rows, queries, window) not in self.seen:
            places = self.places.of(rows).with_queries(queries)
            if window is not None and window < self.room.prompt_tokens + self.room.new_tokens:
                places = places.within(window)
            self.seen[rows, queries, window] = places
        return LayerAttention(
            kernel=held.kernel,
            prompts=held.prompts,
            own=(held.own[0][:rows], held.own[1][:rows]),
            places=self.seen[rows, queries, window],
            newest_1=self.newest_1,
        )

    def recur(self, layer: int, tokens: DeltaTokens, scan: DeltaScan) -> Tensor:
        held, rows = self.states[layer], len(tokens.mixed_RTO)
        recent, memory_RAEE = held.recent[:rows], held.memory_RAEE[:rows]
        if self.keeps_states:
            recent, memory_RAEE = recent.clone(), memory_RAEE.clone()
        return scan.step(tokens, DeltaState(recent=recent, memory_RAEE=memory_RAEE))

    def _new_layer(self, key_BJPE: Tensor) -> _Layer:
        kernel, room = kernel_for(key_BJPE), self.room

        def pair(sequences: int, tokens: int) -> KeysAndValues:
            return kernel.memory(key_BJPE, sequences, tokens), kernel.memory(key_BJPE, sequences, tokens)

        return _Layer(
            kernel=kernel, prompts=pair(room.prompts, room.prompt_tokens), own=pair(room.rows, room.new_tokens)
        )

    def _arrange(self) -> None:
        """Write the places of the rows, which are sorted by prompt, and how many of their own tokens are used."""
        counts = Counter(self.prompt_of)
        ends = accumulate(counts[prompt] for prompt in range(self.room.prompts))
        self.places.bounds.copy_(self._moved([0, *ends]))
        self.places.slots_R[: len(self.prompt_of)] = self._moved(slots_of(self.prompt_of, self.room.group_size))
        unused = self._moved([*self.unused, *[0] * (self.room.rows + 1 - len(self.unused))])
        self.newest_1.fill_(self.length - 1)
        self.places.used_R.copy_(self.length - unused[:-1])
        self.places.own_starts.copy_(self.places.row_order * self.room.new_tokens + unused)

    def _put_rows(self, target: DeltaState, rows: DeltaState) -> None:
        target.recent[: len(rows.recent)] = rows.recent
        target.memory_RAEE[: len(rows.memory_RAEE)] = rows.memory_RAEE

    def _moved(self, numbers: Sequence[int]) -> Tensor:
        return moved(torch.tensor(numbers, dtype=torch.int64), self.device)
