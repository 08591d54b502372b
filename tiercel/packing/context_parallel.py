"""A pack that several ranks compute together, for rows that are too long for one.

The pack is cut into twice as many chunks as there are ranks. Rank w of W has chunks w and 2 W - 1 - w, counted from 0,
so that all have about as many keys to see (Llama 3 2024, https://arxiv.org/abs/2407.21783, section 3.3.2). Layers
gather the keys and values of all ranks, and sum their gradients back. What is computed of the scored tokens is gathered
too: every rank has the loss of the whole pack, and goes backward through its own part. The sum of the ranks' gradients
is that of one pass over the pack.

Shape suffixes: docs/shapes.md. Here S are this rank's tokens, M the scored tokens that their states predict, and T the
tokens of the pack with those that fill its last chunks.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from tiercel.devices import moved
from tiercel.distributed.context import ContextGroup
from tiercel.models.layers.attention import Layer, PackAttend
from tiercel.models.layers.delta_net import DeltaScan, DeltaTokens
from tiercel.models.layers.sight import Sight, Span
from tiercel.packing.forms import PackedForm
from tiercel.packing.layout import PackedTokens, PrefixLayout
from tiercel.packing.logprobs import TokenScores


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Tells which tokens of a pack a rank computes."""

    layout: PrefixLayout  # of the pack with what fills it
    spans: tuple[Span, Span]
    scored_M: Tensor  # int64, the places among the scored tokens
    states_M: Tensor  # int64, the places among this rank's tokens of the states that predict them
    counts: tuple[int, ...]  # scored tokens of each rank
    order_N: Tensor  # int64, the places among the scored tokens of all ranks, one rank after the other

    def of(self, tensor_T: Tensor) -> Tensor:
        """Return the entries of this rank's tokens, of the last dimension. The pack's own tokens are filled with 0."""
        filled = pad(tensor_T, (0, self.layout.length - tensor_T.shape[-1]))
        return torch.cat([filled[..., start:stop] for start, stop in self.spans], dim=-1)


def part_of(batch: PackedTokens, group: ContextGroup, multiple: int) -> Part:
    """Choose the part of a rank. `multiple`: what divides the tokens of a chunk."""
    length, size = batch.layout.length, group.size
    chunk = -(-length // (2 * size * multiple)) * multiple
    own = (group.place, 2 * size - 1 - group.place)
    chunk_N = batch.scoring_N // chunk
    rank_N = torch.minimum(chunk_N, 2 * size - 1 - chunk_N)
    scored_M = (rank_N == group.place).nonzero()[:, 0]
    states_M = batch.scoring_N[scored_M] % chunk + chunk * (chunk_N[scored_M] >= size)
    return Part(
        layout=batch.layout.padded(0, 2 * size * chunk - length),
        spans=((own[0] * chunk, (own[0] + 1) * chunk), (own[1] * chunk, (own[1] + 1) * chunk)),
        scored_M=scored_M,
        states_M=states_M,
        counts=tuple(torch.bincount(rank_N, minlength=size).tolist()),
        order_N=rank_N.argsort(stable=True).argsort(),
    )


class GatheredAttention:
    """Computes `attend` for this rank's queries, over the keys of all ranks."""

    def __init__(self, attend: PackAttend, group: ContextGroup):
        self.attend = attend
        self.group = group

    def prepare(self, sight: Sight) -> None:
        self.attend.prepare(sight)

    def __call__(self, layer: Layer, query_BASE: Tensor, key_BJSE: Tensor, value_BJSE: Tensor) -> Tensor:
        key_BJTE, value_BJTE = self.group.gathered([key_BJSE, value_BJSE], dim=2)
        return self.attend(layer, query_BASE, key_BJTE, value_BJTE)


class PartForm(PackedForm):
    """Computes what this rank's tokens take from those of all ranks. Layers with a state are computed whole by every
    rank, for each of their tokens needs all before it."""

    def __init__(self, attend: PackAttend, batch: PackedTokens, part: Part, group: ContextGroup, device: torch.device):
        super().__init__(attend, batch.layout, device)
        self.part = part
        self.group = group
        self.length = batch.layout.length

    def recur(self, layer: int, tokens: DeltaTokens, scan: DeltaScan) -> Tensor:
        given = [tokens.mixed_RTO, tokens.log_decay_RTA, tokens.rate_RTA]
        mixed, log_decay, rate = (each[:, : self.length] for each in self.group.gathered(given, dim=1))
        whole = DeltaTokens(mixed_RTO=mixed, log_decay_RTA=log_decay, rate_RTA=rate)
        output_BTAE = super().recur(layer, whole, scan)
        return self.part.of(output_BTAE.movedim(1, -1)).movedim(-1, 1)


def joined(scores: TokenScores, part: Part, group: ContextGroup) -> TokenScores:
    """Join what all ranks have computed of their scored tokens."""
    own = {name: value_M for name, value_M in scores._asdict().items() if value_M is not None}
    found = dict(zip(own, _JoinedLogprobs.apply(group, part, *own.values()), strict=True))
    every = {name: found[name] if value_M.requires_grad else found[name].detach() for name, value_M in own.items()}
    return scores._replace(**every)


class _JoinedLogprobs(torch.autograd.Function):
    """Gathers values of scored tokens. Every rank has the same loss, so a token's gradient is the same on all of them,
    and each takes that of its own tokens."""

    @staticmethod
    def forward(ctx: Any, group: ContextGroup, part: Part, *tensors_M: Tensor) -> tuple[Tensor, ...]:
        ctx.scored_M = part.scored_M
        width = max(1, *part.counts)
        own = torch.stack([pad(tensor_M, (0, width - len(tensor_M))) for tensor_M in tensors_M])
        every = own.new_empty(group.size, *own.shape)
        dist.all_gather_into_tensor(every, own[None], group.processes)
        rows = torch.cat([every[place, :, :count] for place, count in enumerate(part.counts)], dim=1)
        return tuple(rows[:, moved(part.order_N, rows.device)])

    @staticmethod
    def backward(ctx: Any, *gradients_N: Tensor) -> tuple[Any, ...]:
        scored_M = moved(ctx.scored_M, gradients_N[0].device)
        return None, None, *(gradient_N[scored_M] for gradient_N in gradients_N)
