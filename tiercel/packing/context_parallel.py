"""Packs that several ranks compute together, for rows that are too long for one rank.

The pack is cut into twice as many chunks as there are ranks. Rank w of W has chunks w and 2 W - 1 - w, counted from 0,
so that all ranks attend to about the same number of keys (Llama 3 2024, https://arxiv.org/abs/2407.21783, section
3.3.2). Layers gather the keys and values of all ranks, and sum their gradients back. The results for the scored tokens
are gathered too: every rank has the loss of the whole pack and runs the backward pass through its own part. The sum of
the ranks' gradients equals the gradient of one pass over the pack.

Shape suffixes: docs/shapes.md. Here S are this rank's tokens, M the scored tokens that their states predict, and T the
tokens of the pack including those that fill its last chunks.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from tiercel.devices import moved
from tiercel.distributed.context import ContextGroup
from tiercel.models.layers.attention import Attend, Layer
from tiercel.models.layers.attention_span import Span
from tiercel.models.layers.delta_net import DeltaScan, DeltaTokens
from tiercel.packing.layout import PackedTokens
from tiercel.packing.logprobs import TokenScores
from tiercel.packing.recurrence import PackedForm
from tiercel.packing.tree import PrefixTree


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The tokens of a pack that one rank computes."""

    tree: PrefixTree  # of the pack with its padding
    spans: tuple[Span, Span]
    scored_M: Tensor  # int64, the places among the scored tokens
    states_M: Tensor  # int64, the places among this rank's tokens of the states that predict them
    counts: tuple[int, ...]  # scored tokens of each rank
    order_N: Tensor  # int64, the places among the scored tokens of all ranks, one rank after the other

    def of(self, tensor_T: Tensor) -> Tensor:
        """Return the entries of this rank's tokens along the last dimension. `tensor_T` covers the pack without its
        padding, which is filled with 0."""
        filled = pad(tensor_T, (0, self.tree.length - tensor_T.shape[-1]))
        return torch.cat([filled[..., start:stop] for start, stop in self.spans], dim=-1)


def part_of(batch: PackedTokens, group: ContextGroup, multiple: int) -> Part:
    """Choose this rank's part. The number of tokens in a chunk is a multiple of `multiple`."""
    length, size = batch.tree.length, group.size
    chunk = -(-length // (2 * size * multiple)) * multiple
    own = (group.place, 2 * size - 1 - group.place)
    chunk_N = batch.scoring_N // chunk
    rank_N = torch.minimum(chunk_N, 2 * size - 1 - chunk_N)
    scored_M = (rank_N == group.place).nonzero()[:, 0]
    states_M = batch.scoring_N[scored_M] % chunk + chunk * (chunk_N[scored_M] >= size)
    return Part(
        tree=batch.tree.padded(0, 2 * size * chunk - length),
        spans=((own[0] * chunk, (own[0] + 1) * chunk), (own[1] * chunk, (own[1] + 1) * chunk)),
        scored_M=scored_M,
        states_M=states_M,
        counts=tuple(torch.bincount(rank_N, minlength=size).tolist()),
        order_N=rank_N.argsort(stable=True).argsort(),
    )


class GatheredAttention:
    """The attention `attend` for this rank's queries over the keys of all ranks."""

    def __init__(self, attend: Attend, group: ContextGroup):
        self.attend = attend
        self.group = group

    def __call__(self, layer: Layer, query_BASE: Tensor, key_BJSE: Tensor, value_BJSE: Tensor) -> Tensor:
        key_BJTE, value_BJTE = self.group.gathered([key_BJSE, value_BJSE], dim=2)
        return self.attend(layer, query_BASE, key_BJTE, value_BJTE)


class PartForm(PackedForm):
    """The form for this rank's tokens, which gathers what they need from all ranks. Every rank computes layers with a
    state in full, because each token needs all tokens before it."""

    def __init__(self, attend: Attend, batch: PackedTokens, part: Part, group: ContextGroup, device: torch.device):
        super().__init__(attend, batch.tree, device)
        self.part = part
        self.group = group
        self.length = batch.tree.length

    def recur(self, layer: int, tokens: DeltaTokens, scan: DeltaScan) -> Tensor:
        given = [tokens.mixed_RTO, tokens.log_decay_RTA, tokens.rate_RTA]
        mixed, log_decay, rate = (each[:, : self.length] for each in self.group.gathered(given, dim=1))
        whole = DeltaTokens(mixed_RTO=mixed, log_decay_RTA=log_decay, rate_RTA=rate)
        output_BTAE = super().recur(layer, whole, scan)
        return self.part.of(output_BTAE.movedim(1, -1)).movedim(-1, 1)


def joined(scores: TokenScores, part: Part, group: ContextGroup) -> TokenScores:
    """Join what all ranks have computed for their scored tokens."""
    own = {name: value_M for name, value_M in scores._asdict().items() if value_M is not None}
    found = dict(zip(own, _JoinedLogprobs.apply(group, part, *own.values()), strict=True))
    every = {name: found[name] if value_M.requires_grad else found[name].detach() for name, value_M in own.items()}
    return scores._replace(**every)


class _JoinedLogprobs(torch.autograd.Function):
    """The gathering of values of scored tokens from all ranks. Every rank has the same loss, so a token's gradient is
    the same on all of them, and each rank keeps the gradient of its own tokens."""

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
