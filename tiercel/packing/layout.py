"""Packed rows `[P1 | c11 .. c1G | P2 | c21 ..]`: which token attends to which, and which state predicts which token.

Shape suffixes: docs/shapes.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

import torch
from torch import Tensor

from tiercel.devices import moved
from tiercel.models.layers.sight import FULL, Sight, Span, seen_spans
from tiercel.types import EncodedImage, EncodedPrompt

Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpans:
    """The spans of a prompt and of the completions that continue it."""

    prompt: Span
    completions: tuple[Span, ...]

    def moved(self, by: int) -> "GroupSpans":
        """Return the spans of the group shifted by `by` tokens."""
        prompt, *completions = ((start + by, stop + by) for start, stop in (self.prompt, *self.completions))
        return GroupSpans(prompt=prompt, completions=tuple(completions))


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenKeys:
    """The two spans of the pack that each token sees: part of its prompt, and part of the prompt or completion that it
    belongs to. For a token of a prompt, the first span is empty."""

    prompt_start_T: Tensor  # int64
    prompt_stop_T: Tensor  # int64
    own_start_T: Tensor  # int64
    own_stop_T: Tensor  # int64

    def of(self, queries: Sequence[Span]) -> Tensor:
        """Return start and stop of the first span, then of the second, for the tokens in `queries`: (4, S)."""
        spans_4T = torch.stack([self.prompt_start_T, self.prompt_stop_T, self.own_start_T, self.own_stop_T])
        return torch.cat([spans_4T[:, start:stop] for start, stop in queries], dim=1)

    def mask(self, queries: Sequence[Span]) -> Tensor:
        """Return the mask, bool (S, T), whose rows are the tokens in `queries`: true where the token of the row sees
        the token of the column."""
        order_T = torch.arange(len(self.own_start_T))
        prompt_start, prompt_stop, own_start, own_stop = self.of(queries)[..., None]
        in_prompt_ST = (order_T >= prompt_start) & (order_T < prompt_stop)
        return in_prompt_ST | (order_T >= own_start) & (order_T < own_stop)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixLayout:
    """The layout of a pack, which decides which tokens attend to which. A token of a completion attends to its prompt
    and to the earlier tokens of its completion, a token of a prompt to the earlier tokens of the prompt, as far as the
    layer sees."""

    groups: tuple[GroupSpans, ...]
    length: int  # T
    picture_spans: tuple[Span, ...] = ()  # their tokens see each other if the layer sees whole pictures

    def picture_spans_in(self, own: Span) -> list[Span]:
        """Return the spans of the pictures in a prompt or completion, relative to its start."""
        begin, end = own
        return [(start - begin, stop - begin) for start, stop in self.picture_spans if begin <= start < end]

    def simplest(self, sight: Sight) -> Sight:
        """Return the simplest sight that is equivalent for this layout."""
        longest = [
            group.prompt[1] - group.prompt[0] + max((stop - start for start, stop in group.completions), default=0)
            for group in self.groups
        ]
        return sight.within(max(longest), self.picture_spans)

    def seen_keys(self, sight: Sight) -> SeenKeys:
        """Compute what each token sees."""
        prompt_start_T, prompt_stop_T, own_start_T, own_stop_T = torch.zeros(4, self.length, dtype=torch.int64)
        for group in self.groups:
            for own in (group.prompt, *group.completions):
                start, stop = own
                starts, stops = seen_spans(sight, stop - start, self.picture_spans_in(own))
                own_start_T[start:stop], own_stop_T[start:stop] = starts + start, stops + start
                if own != group.prompt:
                    prompt_start_T[start:stop], prompt_stop_T[start:stop] = group.prompt
                    if sight.window is not None:
                        first_T = group.prompt[1] - sight.window + 1 + torch.arange(stop - start)
                        prompt_start_T[start:stop] = first_T.clamp(*group.prompt)
        return SeenKeys(
            prompt_start_T=prompt_start_T, prompt_stop_T=prompt_stop_T, own_start_T=own_start_T, own_stop_T=own_stop_T
        )

    def padded(self, front: int, back: int) -> "PrefixLayout":
        """Return the layout with `front` more tokens at the start and `back` more at the end. Padding tokens see only
        padding, and no other token sees them."""
        moved = [group.moved(front) for group in self.groups]
        length = front + self.length + back
        ends = [(0, front), (length - back, length)]
        padding = [GroupSpans(prompt=span, completions=()) for span in ends if span[0] < span[1]]
        pictures = tuple((start + front, stop + front) for start, stop in self.picture_spans)
        return PrefixLayout(groups=(*moved, *padding), length=length, picture_spans=pictures)

    def after(self, first: int) -> tuple[Span, ...]:
        """Return the spans of the tokens from `first` on."""
        return ((first, self.length),)

    def dense_mask(self, device: torch.device, sight: Sight = FULL, queries: Sequence[Span] | None = None) -> Tensor:
        """Return the mask, bool (1, 1, S, T): true where the token of the row attends to the token of the column.
        `queries` are the spans of the rows' tokens; None means all tokens."""
        mask_ST = self.seen_keys(sight).mask(queries or self.after(0))
        return moved(mask_ST[None, None], device)


class BySight(Generic[Made]):
    """A cache of what a form derives from a layout, built once for each sight that differs there."""

    def __init__(self, layout: PrefixLayout, make: Callable[[Sight], Made]):
        self.layout = layout
        self.make = cache(make)

    def of(self, sight: Sight) -> Made:
        return self.make(self.layout.simplest(sight))


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """The tokens that follow a prompt: a sampled completion, or the rest of an SFT conversation."""

    token_ids_L: Tensor  # int64
    positions_DL: Tensor  # int64
    is_scored_L: Tensor  # bool
    picture_spans: tuple[Span, ...] = ()  # as in EncodedPrompt
    images: tuple[EncodedImage, ...] = ()  # in the order of their placeholders


@dataclass(frozen=True, kw_only=True, slots=True)
class PackItem:
    """A prompt and its continuations, the unit of packing."""

    prompt: EncodedPrompt
    continuations: tuple[Continuation, ...]

    @property
    def images(self) -> tuple[EncodedImage, ...]:
        """Return all pictures, in the order of their placeholders."""
        return self.prompt.images + tuple(image for each in self.continuations for image in each.images)

    @property
    def shared_length(self) -> int:
        """Count the tokens, counting the prompt once."""
        return len(self.prompt.token_ids_P) + sum(len(c.token_ids_L) for c in self.continuations)

    @property
    def repeated_length(self) -> int:
        """Count the tokens, counting the prompt once for each continuation."""
        return self.shared_length + (len(self.continuations) - 1) * len(self.prompt.token_ids_P)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedTokens:
    """One microbatch for the learner."""

    layout: PrefixLayout
    token_ids_T: Tensor  # int64
    positions_DT: Tensor  # int64
    images: tuple[EncodedImage, ...]  # in the order of their placeholders
    image_counts: tuple[int, ...]  # of each group
    scoring_N: Tensor  # int64, the place in the pack whose state predicts the token
    targets_N: Tensor  # int64, the predicted token
    continuation_of_N: Tensor  # int64, the number of the token's continuation

    @property
    def continuation_count(self) -> int:
        """Count the continuations of all groups, C."""
        return sum(len(group.completions) for group in self.layout.groups)


def pack(items: Sequence[PackItem]) -> PackedTokens:
    """Place groups end to end. Continuations are numbered in the order of the items; an item may have none."""
    nothing = torch.empty(0, dtype=torch.int64)
    ids: list[Tensor] = []
    positions: list[Tensor] = []
    groups: list[GroupSpans] = []
    pictures: list[Span] = []
    scoring, targets, owners = [nothing], [nothing], [nothing]
    start = count = 0
    for item in items:
        prompt = item.prompt
        prompt_span = (start, start + len(prompt.token_ids_P))
        pictures += [(first + start, last + start) for first, last in prompt.picture_spans]
        ids.append(prompt.token_ids_P)
        positions.append(prompt.positions_DP)
        start = prompt_span[1]
        spans: list[Span] = []
        for continuation in item.continuations:
            span = (start, start + len(continuation.token_ids_L))
            pictures += [(first + start, last + start) for first, last in continuation.picture_spans]
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
        layout=PrefixLayout(groups=tuple(groups), length=start, picture_spans=tuple(pictures)),
        token_ids_T=torch.cat(ids),
        positions_DT=torch.cat(positions, dim=1),
        images=tuple(image for item in items for image in item.images),
        image_counts=tuple(len(item.images) for item in items),
        scoring_N=torch.cat(scoring),
        targets_N=torch.cat(targets),
        continuation_of_N=torch.cat(owners),
    )
