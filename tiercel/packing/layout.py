"""Packs: prompts and their continuations as one row of tokens, in which beginnings that they share stand once.

Shape suffixes: docs/shapes.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tiercel.models.layers.sight import Span
from tiercel.packing.sharing import SHORTEST, Branch, PictureFamily, Segment, TreeBuilder, built, located
from tiercel.packing.tree import Node, PrefixTree
from tiercel.types import EncodedImage, EncodedPrompt


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

    tree: PrefixTree
    token_ids_T: Tensor  # int64
    positions_DT: Tensor  # int64
    images: tuple[EncodedImage, ...]  # in the order of their placeholders
    image_nodes: tuple[int, ...]  # the number of each image's node
    ends_C: tuple[int, ...]  # the number of the node with which each continuation ends
    scoring_N: Tensor  # int64, the place in the pack whose state predicts the token
    targets_N: Tensor  # int64, the predicted token
    continuation_of_N: Tensor  # int64, the number of the token's continuation
    repeated_length: int  # tokens that would be computed if each continuation repeated its prompt

    def distinct(self) -> tuple["PackedTokens", Tensor] | None:
        """Return the pack with each scored token of a shared node once, and the number there of each of the N tokens;
        None if fewer than SHORTEST tokens would be saved. The owners of the tokens are not kept."""
        if len(set(self.ends_C)) == self.continuation_count and max(self.tree.levels, default=0) < 2:
            return None  # completions and their prompts; the values are not needed, which a plan does not have
        words = 1 + int(self.targets_N.max()) if len(self.targets_N) else 1
        pairs_M, number_N = (self.scoring_N * words + self.targets_N).unique(return_inverse=True)
        if len(number_N) - len(pairs_M) < SHORTEST:
            return None
        nothing = torch.empty(0, dtype=torch.int64)
        once = replace(self, scoring_N=pairs_M // words, targets_N=pairs_M % words, continuation_of_N=nothing)
        return once, number_N

    @property
    def continuation_count(self) -> int:
        """Count the continuations, C."""
        return len(self.ends_C)

    def only(self, first: int, last: int) -> "PackedTokens":
        """Cut the continuations from `first` up to, but not including, `last` out of the pack."""
        kept = sorted({number for end in self.ends_C[first:last] for number in self.tree.path(end)})
        new = {number: place for place, number in enumerate(kept)}
        nodes, place = [], 0
        for number in kept:
            (start, stop), parent = self.tree.nodes[number].span, self.tree.nodes[number].parent
            nodes.append(Node((place, place + stop - start), None if parent is None else new[parent]))
            place += stop - start
        places_T = torch.cat([torch.arange(*self.tree.nodes[number].span) for number in kept])
        to_new = torch.full((self.tree.length,), -1).scatter(0, places_T, torch.arange(place))
        pictures = [span for span in self.tree.picture_spans if to_new[span[0]] >= 0]
        images = [each for each in zip(self.images, self.image_nodes, strict=True) if each[1] in new]
        is_own_N = (self.continuation_of_N >= first) & (self.continuation_of_N < last)
        return PackedTokens(
            tree=PrefixTree(
                nodes=tuple(nodes),
                picture_spans=tuple((int(to_new[start]), int(to_new[stop - 1]) + 1) for start, stop in pictures),
            ),
            token_ids_T=self.token_ids_T[places_T],
            positions_DT=self.positions_DT[:, places_T],
            images=tuple(image for image, _ in images),
            image_nodes=tuple(new[number] for _, number in images),
            ends_C=tuple(new[end] for end in self.ends_C[first:last]),
            scoring_N=to_new[self.scoring_N[is_own_N]],
            targets_N=self.targets_N[is_own_N],
            continuation_of_N=self.continuation_of_N[is_own_N] - first,
            repeated_length=sum(len(self.tree.places(end)) for end in self.ends_C[first:last]),
        )


def add_item(builder: TreeBuilder, item: PackItem, number: int = 0) -> Branch:
    """Add an item's prompt and continuations, which are numbered from `number` on. Return the prompt's last node."""
    prompt = item.prompt
    end = builder.add_prompt(
        Segment(
            ids_L=prompt.token_ids_P,
            positions_DL=prompt.positions_DP,
            pictures=located(prompt.token_ids_P, prompt.images, builder.family),
            picture_spans=prompt.picture_spans,
        )
    )
    for place, each in enumerate(item.continuations):
        tokens = Segment(
            ids_L=each.token_ids_L,
            positions_DL=each.positions_DL,
            pictures=located(each.token_ids_L, each.images, builder.family),
            picture_spans=each.picture_spans,
        )
        builder.add(end, tokens, number + place)
    return end


def pack(items: Sequence[PackItem], family: PictureFamily | None = None) -> PackedTokens:
    """Lay items into a tree. With `family`, items and continuations that begin alike share that beginning; without it,
    only the continuations of an item share, and they share its prompt. Continuations are numbered in the order of the
    items; an item may have none."""
    builder, count = TreeBuilder(family), 0
    for item in items:
        add_item(builder, item, count)
        count += len(item.continuations)
    laid = built(builder)
    nothing = torch.empty(0, dtype=torch.int64)
    scoring, targets, owners = [nothing], [nothing], [nothing]
    for number, continuation in enumerate(each for item in items for each in item.continuations):
        scored_L = continuation.is_scored_L
        # The last state before a continuation predicts its first token, each later state the token after it.
        before_L = laid.tree.places(laid.ends[number])[-len(scored_L) - 1 : -1]
        scoring.append(before_L[scored_L])
        targets.append(continuation.token_ids_L[scored_L])
        owners.append(torch.full((int(scored_L.sum()),), number))
    return PackedTokens(
        tree=laid.tree,
        token_ids_T=laid.token_ids_T,
        positions_DT=laid.positions_DT,
        images=laid.images,
        image_nodes=laid.image_nodes,
        ends_C=tuple(laid.ends[number] for number in range(count)),
        scoring_N=torch.cat(scoring),
        targets_N=torch.cat(targets),
        continuation_of_N=torch.cat(owners),
        repeated_length=sum(item.repeated_length for item in items),
    )
