"""Packs: prompts and their continuations as one row of tokens, in which beginnings that they share stand once.

Shape suffixes: docs/shapes.md.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiercel.models.layers.attention_span import Span
from tiercel.packing import sharing
from tiercel.packing.sharing import PictureFamily, Segment, TreeBuilder, located
from tiercel.packing.tree import PrefixTree, end_to_end, shifted
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

    @classmethod
    def of_prompt(cls, prompt: EncodedPrompt) -> "PackItem":
        """Build an item whose only sequence is a prompt: nothing continues it."""
        ids_L, positions_DL = prompt.token_ids_P[:0], prompt.positions_DP[:, :0]
        nothing = Continuation(token_ids_L=ids_L, positions_DL=positions_DL, is_scored_L=ids_L.bool())
        return cls(prompt=prompt, continuations=(nothing,))

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

    def only(self, rows: Sequence[int], above: Sequence[int] = ()) -> "PackedTokens":
        """Cut rows out of the pack. All are below the path of nodes `above`, if there is one, which passes of their own
        compute: it becomes the first node, without its pictures."""
        numbers = {number for row in rows for number in self.tree.path(self.ends_C[row])}
        return self._of_nodes(numbers, above, rows)

    def prefix(self, path: Sequence[int]) -> "PackedTokens":
        """Cut the last node of a path from a root out of the pack, without rows, after the others as the first node."""
        return self._of_nodes(path, path[:-1], ())

    def _of_nodes(self, numbers: Collection[int], above: Sequence[int], rows: Sequence[int]) -> "PackedTokens":
        """Cut nodes out of the pack, with the nodes of the path `above` as one."""
        own = sorted(set(numbers).difference(above))
        groups = [*([above] if above else []), *([number] for number in own)]
        tree, places = self.tree.regrouped(groups)
        new = {node: number for number, group in enumerate(groups) for node in group}
        places_T = torch.cat(places)
        to_new = torch.full((self.tree.length,), -1).scatter(0, places_T, torch.arange(len(places_T)))
        shown = [place for place, node in enumerate(self.image_nodes) if node in new and node not in above]
        order = {row: number for number, row in enumerate(rows)}
        is_own_N = torch.isin(self.continuation_of_N, torch.tensor(list(rows), dtype=torch.int64))
        owners = [order[row] for row in self.continuation_of_N[is_own_N].tolist()]
        ends = [self.ends_C[row] for row in rows]
        return PackedTokens(
            tree=tree,
            token_ids_T=self.token_ids_T[places_T],
            positions_DT=self.positions_DT[:, places_T],
            images=tuple(self.images[place] for place in shown),
            image_nodes=tuple(new[self.image_nodes[place]] for place in shown),
            ends_C=tuple(new[end] for end in ends),
            scoring_N=to_new[self.scoring_N[is_own_N]],
            targets_N=self.targets_N[is_own_N],
            continuation_of_N=torch.tensor(owners, dtype=torch.int64),
            repeated_length=sum(map(self.tree.length_to, ends)),
        )


def add_item(builder: TreeBuilder, item: PackItem, number: int = 0) -> None:
    """Add an item's prompt and continuations, which are numbered from `number` on."""

    def tokens(of: EncodedPrompt | Continuation, ids_L: Tensor, positions_DL: Tensor) -> Segment:
        pictures = located(ids_L, of.images, builder.family)
        return Segment(ids_L=ids_L, positions_DL=positions_DL, pictures=pictures, picture_spans=of.picture_spans)

    prompt = builder.add(None, tokens(item.prompt, item.prompt.token_ids_P, item.prompt.positions_DP))
    for place, each in enumerate(item.continuations):
        end = builder.add(prompt, tokens(each, each.token_ids_L, each.positions_DL))
        end.ends.append(number + place)


def pack(items: Sequence[PackItem], family: PictureFamily | None = None) -> PackedTokens:
    """Lay items into a tree. With `family`, items and continuations that begin alike share that beginning; without it,
    only the continuations of an item share, and they share its prompt. Continuations are numbered in the order of the
    items; an item may have none."""
    builder = TreeBuilder(family)
    rows: list[Continuation] = []
    for item in items:
        add_item(builder, item, len(rows))
        rows += item.continuations
    branches, parents = zip(*builder.walk(), strict=True)
    tokens = [branch.tokens for branch in branches]
    nodes = end_to_end(list(map(len, tokens)), parents)
    spans = [shifted(each, node.span[0]) for node, own in zip(nodes, tokens, strict=True) for each in own.picture_spans]
    tree = PrefixTree(nodes=nodes, picture_spans=tuple(spans))
    images = [(image, node) for node, own in enumerate(tokens) for found in own.pictures for image in found.images]
    end_of = {row: node for node, branch in enumerate(branches) for row in branch.ends}
    ends_C = tuple(end_of[row] for row in range(len(rows)))
    lengths = [len(row.token_ids_L) for row in rows]
    owners = [torch.full((length,), row) for row, length in enumerate(lengths)]
    none = torch.empty(0, dtype=torch.int64)
    # The last state before a continuation predicts its first token, each later state the token after it.
    before = [tree.places(end)[-length - 1 : -1] for end, length in zip(ends_C, lengths, strict=True)]
    is_scored = torch.cat([none.bool(), *(row.is_scored_L for row in rows)])
    return PackedTokens(
        tree=tree,
        token_ids_T=torch.cat([own.ids_L for own in tokens]),
        positions_DT=torch.cat([own.positions_DL for own in tokens], dim=1),
        images=tuple(image for image, _ in images),
        image_nodes=tuple(node for _, node in images),
        ends_C=ends_C,
        scoring_N=torch.cat([none, *before])[is_scored],
        targets_N=torch.cat([none, *(row.token_ids_L for row in rows)])[is_scored],
        continuation_of_N=torch.cat([none, *owners])[is_scored],
        repeated_length=sum(item.repeated_length for item in items),
    )
