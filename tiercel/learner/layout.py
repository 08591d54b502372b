"""Packed rows `[P1 | c11 .. c1G | P2 | c21 ..]`: which token attends to which, and which state predicts which token.

Shape suffixes: docs/shapes.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.types import EncodedImage, EncodedPrompt

Span = tuple[int, int]  # start and stop in the packed row


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpans:
    """Gives the spans of a prompt and of the completions that continue it."""

    prompt: Span
    completions: tuple[Span, ...]

    def moved(self, by: int) -> "GroupSpans":
        """Return the spans of the group where it starts `by` tokens later."""
        prompt, *completions = ((start + by, stop + by) for start, stop in (self.prompt, *self.completions))
        return GroupSpans(prompt=prompt, completions=tuple(completions))


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixLayout:
    """Tells which tokens attend to which: a token of a completion to its prompt and to the earlier tokens of its
    completion, a token of a prompt to the earlier tokens of the prompt."""

    groups: tuple[GroupSpans, ...]
    length: int  # T

    def segments(self) -> tuple[Tensor, Tensor]:
        """Return two tensors, int64 (T,): each token's group, and the number of its completion in the group, counted
        from 1 (0 for a token of the prompt)."""
        group_T = torch.zeros(self.length, dtype=torch.int64)
        segment_T = torch.zeros(self.length, dtype=torch.int64)
        for number, group in enumerate(self.groups):
            group_T[group.prompt[0] : group.prompt[1]] = number
            for i, (start, stop) in enumerate(group.completions):
                group_T[start:stop] = number
                segment_T[start:stop] = i + 1
        return group_T, segment_T

    def padded(self, front: int, back: int) -> "PrefixLayout":
        """Return the layout with this many tokens more at both ends. Tokens of the padding see only padding, and no
        other token sees them."""
        moved = [group.moved(front) for group in self.groups]
        length = front + self.length + back
        ends = [(0, front), (length - back, length)]
        padding = [GroupSpans(prompt=span, completions=()) for span in ends if span[0] < span[1]]
        return PrefixLayout(groups=(*moved, *padding), length=length)

    def dense_mask(self, device: torch.device) -> Tensor:
        """Return the mask, bool (1, 1, T, T): true where the token of the row attends to the token of the column."""
        group_T, segment_T = self.segments()
        order_T = torch.arange(self.length)
        sees_TT = (group_T[:, None] == group_T) & (order_T[:, None] >= order_T)
        sees_TT &= (segment_T == 0) | (segment_T[:, None] == segment_T)
        return sees_TT[None, None].to(device, non_blocking=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """Holds tokens that follow a prompt: a sampled completion, or the rest of an SFT conversation."""

    token_ids_L: Tensor  # int64
    positions_DL: Tensor  # int64
    is_scored_L: Tensor  # bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PackItem:
    """Holds a prompt and its continuations, the unit of packing."""

    prompt: EncodedPrompt
    continuations: tuple[Continuation, ...]

    @property
    def shared_length(self) -> int:
        """Count the tokens, with the prompt once."""
        return len(self.prompt.token_ids_P) + sum(len(c.token_ids_L) for c in self.continuations)

    @property
    def repeated_length(self) -> int:
        """Count the tokens, with the prompt once for each continuation."""
        return self.shared_length + (len(self.continuations) - 1) * len(self.prompt.token_ids_P)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTokens:
    """Holds one microbatch for the learner."""

    layout: PrefixLayout
    token_ids_T: Tensor  # int64
    positions_DT: Tensor  # int64
    images: tuple[EncodedImage, ...]  # in the order of their placeholders
    scoring_N: Tensor  # int64, the place in the pack whose state predicts the token
    targets_N: Tensor  # int64, the predicted token
    continuation_of_N: Tensor  # int64, the number of the token's continuation


def pack(items: Sequence[PackItem]) -> PackedTokens:
    """Put groups end to end. Continuations are numbered in the order of the items. An item may have none."""
    nothing = torch.empty(0, dtype=torch.int64)
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    groups: list[GroupSpans] = []
    scoring, targets, owners = [nothing], [nothing], [nothing]
    start = count = 0
    for item in items:
        prompt = item.prompt
        prompt_span = (start, start + len(prompt.token_ids_P))
        ids.append(prompt.token_ids_P)
        positions.append(prompt.positions_DP)
        start = prompt_span[1]
        spans: list[Span] = []
        for continuation in item.continuations:
            span = (start, start + len(continuation.token_ids_L))
            ids.append(continuation.token_ids_L)
            positions.append(continuation.positions_DL)
            places_L = torch.arange(span[0] - 1, span[1] - 1)
            places_L[0] = prompt_span[1] - 1  # the last state of the prompt predicts every first token
            scored_L = continuation.is_scored_L
            scoring.append(places_L[scored_L])
            targets.append(continuation.token_ids_L[scored_L])
            owners.append(torch.full((int(scored_L.sum()),), count))
            spans.append(span)
            start = span[1]
            count += 1
        groups.append(GroupSpans(prompt=prompt_span, completions=tuple(spans)))
    return PackedTokens(
        layout=PrefixLayout(groups=tuple(groups), length=start),
        token_ids_T=torch.cat(ids),
        positions_DT=torch.cat(positions, dim=1),
        images=tuple(image for item in items for image in item.prompt.images),
        scoring_N=torch.cat(scoring),
        targets_N=torch.cat(targets),
        continuation_of_N=torch.cat(owners),
    )
