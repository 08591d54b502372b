"""The form of packed rows `[P1 | c11 .. c1G | P2 | ..]`: their attention, and the recurrence of layers with a state.
Each prompt starts from an empty state, and each of its completions from the state after the prompt.

Shape suffixes: docs/shapes.md. Here R are rows of similar length, padded to L tokens; A, O as in
models/layers/delta_net.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tiercel.devices import moved
from tiercel.errors import ModelError
from tiercel.models.layers.attention import Layer, PackAttend
from tiercel.models.layers.delta_net import DeltaScan, DeltaState, DeltaTokens
from tiercel.packing.attention.forms import Bucket, bucket_of, similar
from tiercel.packing.layout import PackItem, PrefixLayout


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rows:
    """Spans of similar length that run side by side."""

    bucket: Bucket
    lengths_R: Tensor
    group_R: Tensor  # the number of each span's group


class PackedForm:
    """The attention of a pack, computed by `attend`, and its recurrence. `first_query` is the number of tokens at the
    start that were run before."""

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
    """The recurrence over a pack: first its prompts, then all completions. `first_query` is the number of tokens at the
    start that were run before."""

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
        """Return the output (1, S, A, E) of the tokens, and the state after each prompt. Pass that state as `start` if
        the prompts are not part of `tokens`."""
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
    """Build rows from spans, each given with the number of its group."""
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


AUTO = {"cpu": "split", "cuda": "flex"}
CONTINUES_A_PREFIX = ("split", "flex")  # forms that can run completions after a separate pass over their prompt
COMPUTES_PARTS = ("flex", "dense")  # forms that ranks can compute together, each for its share of the tokens


def chosen_form(asked: str, device: torch.device, obstacle: str | None, *, in_parts: bool = False) -> str:
    """Choose the form to run. `obstacle` says why the model cannot share prompts (see `shared_prefix_obstacle`), in
    which case `auto` becomes `repeated`. `in_parts` is true if ranks compute a pack together. Raises ModelError if this
    device or model cannot compute the form."""
    if in_parts and obstacle:
        raise ModelError(f"train.context_parallel: ranks cannot compute a row together: {obstacle}; remove it")
    if asked == "auto" and in_parts:
        return "flex" if device.type == "cuda" else "dense"
    if asked == "auto":
        return "repeated" if obstacle else AUTO.get(device.type, "dense")
    if asked != "repeated" and obstacle:
        raise ModelError(
            f"learner.form: {asked} runs a prompt once, which this model cannot do: {obstacle}; use repeated"
        )
    if asked == "split" and device.type != "cpu":
        raise ModelError(f"learner.form: split runs only on a CPU, but the device is {device.type}; use flex")
    if asked == "flex" and device.type == "cpu":
        raise ModelError("learner.form: flex has no backward pass on a CPU; use split")
    return asked


def packed_length(item: PackItem, form: str) -> int:
    """Return the number of tokens that a form computes for an item."""
    return item.repeated_length if form == "repeated" else item.shared_length
