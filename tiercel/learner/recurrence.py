"""The form of packed rows `[P1 | c11 .. c1G | P2 | ..]`: their attention, and the recurrence of layers with a state, in
which each prompt starts from an empty state, and each of its completions from the state after the prompt.

Shape suffixes: docs/shapes.md. Here R are rows of similar length, padded to L tokens; A, O as in models/delta_net.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tiercel.devices import moved
from tiercel.learner.attention import Bucket, bucket_of, similar
from tiercel.learner.layout import PrefixLayout
from tiercel.models.attention import Layer, PackAttend
from tiercel.models.delta_net import DeltaScan, DeltaState, DeltaTokens


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """Spans of similar length that are run side by side."""

    bucket: Bucket
    lengths_R: Tensor
    group_R: Tensor  # the number of each span's group


class PackedForm:
    """Computes the attention of a pack by `attend`, and its recurrence. `first_query`: how many tokens at the start
    were run before."""

    def __init__(self, attend: PackAttend, layout: PrefixLayout, device: torch.device, first_query: int = 0):
        self.attend = attend
        self._made_from = layout, device, first_query

    @cached_property
    def recurrence(self) -> "PackedRecurrence":
        return PackedRecurrence(*self._made_from)

    def __call__(self, layer: Layer, query_BATE: Tensor, key_BJTE: Tensor, value_BJTE: Tensor) -> Tensor:
        return self.attend(layer, query_BATE, key_BJTE, value_BJTE)

    def recur(self, layer: int, tokens: DeltaTokens, scan: DeltaScan) -> Tensor:
        return self.recurrence(tokens, scan)[0]


class PackedRecurrence:
    """Runs the prompts of a pack, then all completions. `first_query`: how many tokens at the start were run before."""

    def __init__(self, layout: PrefixLayout, device: torch.device, first_query: int = 0):
        prompts, completions = [], []
        for number, group in enumerate(layout.groups):
            if group.prompt[0] >= first_query:
                prompts.append((group.prompt[0] - first_query, group.prompt[1] - first_query, number))
            completions += [(start - first_query, stop - first_query, number) for start, stop in group.completions]
        self.prompts = _rows_of(prompts, device)
        self.completions = _rows_of(completions, device)

    def __call__(
        self, tokens: DeltaTokens, scan: DeltaScan, start: DeltaState | None = None
    ) -> tuple[Tensor, DeltaState]:
        """Return the output (1, S, A, E) of the tokens, and the state after each prompt. `start`: that state, where the
        prompts are not part of `tokens`."""
        outputs: list[Tensor] = []
        places: list[Tensor] = []
        states, groups = [], []
        for rows in self.prompts:
            output, state = scan(tokens.rows(rows.bucket.places_RL, rows.bucket.is_padding_RL), rows.lengths_R)
            _put(outputs, places, output, rows.bucket)
            states.append(state)
            groups.append(rows.group_R)
        if start is None:
            start = _joined(states).of(torch.cat(groups).argsort())
        for rows in self.completions:
            of_rows = tokens.rows(rows.bucket.places_RL, rows.bucket.is_padding_RL)
            output, _ = scan(of_rows, rows.lengths_R, start.of(rows.group_R))
            _put(outputs, places, output, rows.bucket)
        return torch.cat(outputs)[torch.cat(places).argsort()][None], start


def _rows_of(spans: Sequence[tuple[int, int, int]], device: torch.device) -> list[_Rows]:
    """Make rows of spans, each given with the number of its group."""
    group_of = {(start, stop): number for start, stop, number in spans}
    return [
        _Rows(
            bucket=bucket_of(bucket, 0, device),
            lengths_R=moved(torch.tensor([stop - start for start, stop in bucket]), device),
            group_R=moved(torch.tensor([group_of[span] for span in bucket]), device),
        )
        for bucket in similar(list(group_of))
    ]


def _put(outputs: list[Tensor], places: list[Tensor], output_RLAE: Tensor, bucket: Bucket) -> None:
    outputs.append(output_RLAE.flatten(0, 1)[bucket.valid])
    places.append(bucket.valid_places)


def _joined(states: Sequence[DeltaState]) -> DeltaState:
    return DeltaState(
        recent=torch.cat([state.recent for state in states]),
        memory_RAEE=torch.cat([state.memory_RAEE for state in states]),
    )
