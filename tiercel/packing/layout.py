"""Packs: prompts and their continuations as one row of tokens, in which beginnings that they share stand once.

Shape suffixes: docs/shapes.md.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.models.layers.attention_span import Span
from tiercel.packing import sharing
from tiercel.packing.sharing import Branch, PictureFamily, Segment, TreeBuilder, built, located
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

    @property
    def continuation_count(self) -> int:
        """Count the continuations, C."""
        return len(self.ends_C)

    @property
    def scored_lengths(self) -> list[int]:
        """Return the number of scored tokens of each continuation."""
        return torch.bincount(self.continuation_of_N, minlength=self.continuation_count).tolist()

    def distinct(self) -> tuple[Tensor, Tensor] | None:
        """Return the first of the scored tokens that stand at the same place of the tree (M,), and for each scored
        token which of these it is (N,). None if this saves too few tokens to pay."""
        if len(set(self.ends_C)) == self.continuation_count and len(self.tree.levels) < 3:
            return None  # prompts and their completions alone; the planner has shapes here, but no values
        pairs_N = self.targets_N * self.tree.length + self.scoring_N
        distinct_M, which_N = torch.unique(pairs_N, return_inverse=True)
        if len(pairs_N) - len(distinct_M) < sharing.SHORTEST:
            return None
        order_N = torch.arange(len(which_N))
        first_M = torch.full((len(distinct_M),), len(which_N)).scatter_reduce(0, which_N, order_N, "amin")
        return first_M, which_N

    def only(self, rows: Sequence[int], below: int | None = None) -> "PackedTokens":
        """Cut rows out of the pack. If `below` is given, all rows are in the subtree of that node, and a pass of its
        own computes the path down to it: the path becomes the first node, without its pictures."""
        numbers = {number for row in rows for number in self.tree.path(self.ends_C[row])}
        return self._of_nodes(numbers, [] if below is None else self.tree.path(below), rows)

    def prefix(self, node: int, below: int | None) -> "PackedTokens":
        """Cut a node out of the pack, without rows, after the path down to `below`, which becomes the first node."""
        return self._of_nodes({node}, [] if below is None else self.tree.path(below), ())

    def _of_nodes(self, numbers: Collection[int], above: Sequence[int], rows: Sequence[int]) -> "PackedTokens":
        """Cut nodes out of the pack, with the nodes of the path `above` as one."""
        kept = [*above, *sorted(set(numbers).difference(above))]
        parts = [torch.arange(*self.tree.nodes[number].span) for number in kept]
        places_T = torch.cat(parts)
        to_new = torch.full((self.tree.length,), -1).scatter(0, places_T, torch.arange(len(places_T)))
        new = dict.fromkeys(above, 0)
        nodes = [Node((0, sum(map(len, parts[: len(above)]))))] if above else []
        place = nodes[0].span[1] if above else 0
        for number in kept[len(above) :]:
            (start, stop), parent = self.tree.nodes[number].span, self.tree.nodes[number].parent
            new[number] = len(nodes)
            nodes.append(Node((place, place + stop - start), None if parent is None else new[parent]))
            place += stop - start
        pictures = [span for span in self.tree.picture_spans if to_new[span[0]] >= 0]
        images = [
            (image, new[node])
            for image, node in zip(self.images, self.image_nodes, strict=True)
            if node in new and node not in above
        ]
        order = {row: number for number, row in enumerate(rows)}
        is_own_N = torch.isin(self.continuation_of_N, torch.tensor(list(rows), dtype=torch.int64))
        owners = [order[row] for row in self.continuation_of_N[is_own_N].tolist()]
        return PackedTokens(
            tree=PrefixTree(
                nodes=tuple(nodes),
                picture_spans=tuple((int(to_new[start]), int(to_new[stop - 1]) + 1) for start, stop in pictures),
            ),
            token_ids_T=self.token_ids_T[places_T],
            positions_DT=self.positions_DT[:, places_T],
            images=tuple(image for image, _ in images),
            image_nodes=tuple(node for _, node in images),
            ends_C=tuple(new[self.ends_C[row]] for row in rows),
            scoring_N=to_new[self.scoring_N[is_own_N]],
            targets_N=self.targets_N[is_own_N],
            continuation_of_N=torch.tensor(owners, dtype=torch.int64),
            repeated_length=sum(self.tree.length_to(self.ends_C[row]) for row in rows),
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
