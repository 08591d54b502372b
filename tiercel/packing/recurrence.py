"""The layers of a packed prefix tree: their attention, and the recurrence of those with a state. A root starts from an
empty state, and any other node from the state after its parent.

Shape suffixes: docs/shapes.md. Here R are rows of similar length, padded to L tokens; A, O as in
models/layers/delta_net.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tiercel.devices import moved
from tiercel.models.layers.attention import Attend, Layer
from tiercel.models.layers.delta_net import DeltaScan, DeltaState, DeltaTokens
from tiercel.packing.attention.split_and_dense import Bucket, bucket_of, similar
from tiercel.packing.tree import PrefixTree


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """Nodes of similar length that run side by side."""

    bucket: Bucket
    lengths_R: Tensor
    parent_R: Tensor  # the place of each node's parent in the level above


class PackedForm:
    """The attention of a pack, computed by `attend`, and its recurrence. `first_query` is the number of tokens at the
    start that were run before."""

    def __init__(self, attend: Attend, tree: PrefixTree, device: torch.device, first_query: int = 0):
        self.attend = attend
        self._made_from = tree, device, first_query

    @cached_property
    def recurrence(self) -> "PackedRecurrence":
        return PackedRecurrence(*self._made_from)

    def __call__(self, layer: Layer, query_BATE: Tensor, key_BJTE: Tensor, value_BJTE: Tensor) -> Tensor:
        return self.attend(layer, query_BATE, key_BJTE, value_BJTE)

    def recur(self, layer: int, tokens: DeltaTokens, scan: DeltaScan) -> Tensor:
        return self.recurrence(tokens, scan)[0]


class PackedRecurrence:
    """The recurrence over a tree, level by level: roots, then their children, and so on. `first_query` is the number of
    tokens at the start that were run before; they are the first node."""

    def __init__(self, tree: PrefixTree, device: torch.device, first_query: int = 0):
        self.levels: list[list[_Rows]] = []
        self.orders: list[Tensor] = []  # from the rows of a level's buckets to the order of its nodes
        self.place_of: dict[int, tuple[int, int]] = {}  # the level of a node, and its place there
        for depth, numbers in enumerate(tree.levels):
            run = [number for number in numbers if tree.nodes[number].span[0] >= first_query]
            assert run == numbers or numbers == [0]
            self.place_of |= {number: (depth, place) for place, number in enumerate(numbers)}
            buckets = similar(tree, run)
            self.levels.append([self._rows(tree, bucket, first_query, device) for bucket in buckets])
            places = [self.place_of[number][1] for bucket in buckets for number in bucket]
            self.orders.append(moved(torch.tensor(places, dtype=torch.int64).argsort(), device))

    def _rows(self, tree: PrefixTree, numbers: Sequence[int], first_query: int, device: torch.device) -> _Rows:
        nodes = [tree.nodes[number] for number in numbers]
        parents = [0 if node.parent is None else self.place_of[node.parent][1] for node in nodes]
        return _Rows(
            bucket=bucket_of(tree, numbers, first_query, device),
            lengths_R=moved(torch.tensor([node.size for node in nodes]), device),
            parent_R=moved(torch.tensor(parents), device),
        )

    def __call__(
        self, tokens: DeltaTokens, scan: DeltaScan, start: DeltaState | None = None, after: Sequence[int] = ()
    ) -> tuple[Tensor, DeltaState | None]:
        """Return the output (1, S, A, E) of the tokens, and the states after the nodes with the numbers `after`. Pass
        the state after the first node as `start` if that node is not part of `tokens`."""
        outputs: list[Tensor] = []
        places: list[Tensor] = []
        state, states = start, []
        for level, order in zip(self.levels, self.orders, strict=True):
            ends = []
            for rows in level:
                of_rows = tokens.rows(rows.bucket.places_RL, rows.bucket.is_padding_RL)
                before = None if state is None else state.of(rows.parent_R)
                output, end = scan(of_rows, rows.lengths_R, before)
                outputs.append(output.flatten(0, 1)[rows.bucket.valid])
                places.append(rows.bucket.valid_places)
                ends.append(end)
            if ends:
                state = DeltaState.joined(ends).of(order) if after or level is not self.levels[-1] else None
            states.append(state)
        output = torch.cat(outputs)[torch.cat(places).argsort()][None]
        return output, self._after(states, after) if after else None

    def _after(self, states: Sequence[DeltaState | None], numbers: Sequence[int]) -> DeltaState:
        found = []
        for number in numbers:
            level, place = self.place_of[number]
            of_level = states[level]
            assert of_level is not None
            found.append(of_level.of(torch.tensor([place], device=of_level.recent.device)))
        return DeltaState.joined(found)
