"""Prefix trees: packed tokens in which each beginning that sequences share stands once. Shape suffixes: docs/shapes.md.

The spans of the nodes follow each other in the order of a depth-first walk, `[picture | question 1 | c11 .. c1G |
question 2 | ..]`, so all descendants of a node stand between its end and the place where its subtree stops. A token
sees the earlier tokens of its node and all tokens of the node's ancestors, as far as the layer sees.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Generic, TypeVar

import torch
from torch import Tensor

from tiercel.devices import moved
from tiercel.models.layers.attention_span import FULL, AttentionSpan, Span, seen_spans

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Node:
    """Tokens that stand next to each other and have the same beginning."""

    span: Span
    parent: int | None = None  # its number among the nodes, which is smaller; None: a root

    @property
    def size(self) -> int:
        """Count the tokens."""
        return self.span[1] - self.span[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Visibility:
    """What the tokens of a tree see: the token at place q sees the one at place k if k < until[q], q < stop[k] and
    first[q] <= depth[k]. All are int64.

    until: one more than the place of a token, or the end of its picture if pictures see themselves
    first: the least depth that the window reaches
    stop: the end of the subtree of a token's node
    depth: that of a token in its sequence
    """

    queries_3T: Tensor  # place, until and first
    keys_2T: Tensor  # stop and depth

    def of_queries(self, queries: Sequence[Span]) -> Tensor:
        """Return place, until and first of the tokens in `queries`: (3, S)."""
        return torch.cat([self.queries_3T[:, start:stop] for start, stop in queries], dim=1)

    def mask(self, queries: Sequence[Span]) -> Tensor:
        """Return the mask, bool (S, T), whose rows are the tokens in `queries`: true where the token of the row sees
        the token of the column."""
        place, until, first = self.of_queries(queries)[..., None]
        stop, depth = self.keys_2T
        return (torch.arange(len(stop)) < until) & (place < stop) & (first <= depth)


@dataclass(frozen=True, kw_only=True)
class PrefixTree:
    """The tree of a pack. Its nodes have at least one token each, and their spans lie end to end."""

    nodes: tuple[Node, ...]
    picture_spans: tuple[Span, ...] = ()  # in order, each in one node; their tokens see each other if the layer sees so

    @property
    def length(self) -> int:
        """Count the tokens, T."""
        return self.nodes[-1].span[1] if self.nodes else 0

    @cached_property
    def stops(self) -> tuple[int, ...]:
        """The places where the subtrees of the nodes stop."""
        stops = [node.span[1] for node in self.nodes]
        for number in reversed(range(len(self.nodes))):
            if (parent := self.nodes[number].parent) is not None:
                stops[parent] = max(stops[parent], stops[number])
        return tuple(stops)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The depths of the nodes' first tokens: how many tokens their ancestors have."""
        depths: list[int] = []
        for node in self.nodes:
            before = node.parent
            depths.append(0 if before is None else depths[before] + self.nodes[before].size)
        return tuple(depths)

    @cached_property
    def levels(self) -> list[list[int]]:
        """The numbers of the roots, of their children, and so on."""
        levels: list[list[int]] = []
        for number in range(len(self.nodes)):
            level = len(self.path(number)) - 1
            levels += [[]] if level == len(levels) else []
            levels[level].append(number)
        return levels

    @property
    def roots(self) -> list[Span]:
        """Return the span of each root's whole subtree."""
        return [(node.span[0], stop) for node, stop in zip(self.nodes, self.stops, strict=True) if node.parent is None]

    def length_to(self, number: int) -> int:
        """Count the tokens on the path down to the end of a node."""
        return self.depths[number] + self.nodes[number].size

    def path(self, number: int) -> list[int]:
        """Return the numbers of the nodes from a root down to this one."""
        path = [number]
        while (parent := self.nodes[path[-1]].parent) is not None:
            path.append(parent)
        return path[::-1]

    def places(self, number: int) -> Tensor:
        """Return the places of the tokens on the path down to the end of a node."""
        return self._places(self.path(number))

    def _places(self, numbers: Sequence[int]) -> Tensor:
        return torch.cat([torch.arange(*self.nodes[number].span) for number in numbers])

    def picture_spans_in(self, *numbers: int) -> list[Span]:
        """Return the spans of the pictures in nodes that follow each other on a path, counted from the first token."""
        found: list[Span] = []
        start = 0
        for number in numbers:
            begin, end = self.nodes[number].span
            first, last = (bisect_left(self.picture_spans, (place,)) for place in (begin, end))
            found += [shifted(span, start - begin) for span in self.picture_spans[first:last]]
            start += end - begin
        return found

    def simplest(self, attention_span: AttentionSpan) -> AttentionSpan:
        """Return the simplest attention span that is equivalent for this tree."""
        longest = max(map(self.length_to, range(len(self.nodes))), default=0)
        return attention_span.within(longest, self.picture_spans)

    @property
    def depth_T(self) -> Tensor:
        """The depth of each token, int64: how many tokens stand before it in its sequence."""
        of_nodes = [torch.arange(depth, self.length_to(number)) for number, depth in enumerate(self.depths)]
        return torch.cat([torch.empty(0, dtype=torch.int64), *of_nodes])

    def visibility(self, attention_span: AttentionSpan) -> Visibility:
        """Compute what each token sees."""
        until_T, first_T, stop_T = torch.zeros(3, self.length, dtype=torch.int64)
        depth_T = self.depth_T
        for number, (node, subtree_stop) in enumerate(zip(self.nodes, self.stops, strict=True)):
            start, stop = node.span
            _, own_until = seen_spans(attention_span, node.size, self.picture_spans_in(number))
            until_T[start:stop] = own_until + start
            stop_T[start:stop] = subtree_stop
        if attention_span.window is not None:
            first_T = (depth_T - attention_span.window + 1).clamp_min(0)
        queries_3T = torch.stack([torch.arange(self.length), until_T, first_T])
        return Visibility(queries_3T=queries_3T, keys_2T=torch.stack([stop_T, depth_T]))

    def seen_pairs(self, window: int | None) -> int:
        """Count the pairs of a token and one that it sees, pictures aside."""
        seen_T = self.depth_T + 1
        return int((seen_T if window is None else seen_T.clamp_max(window)).sum())

    def padded(self, front: int, back: int) -> "PrefixTree":
        """Return the tree with `front` more tokens at the start and `back` more at the end. Padding tokens see only
        padding, and no other token sees them."""
        before = [Node((0, front))] if front else []
        moved_nodes = [
            Node(shifted(node.span, front), None if node.parent is None else node.parent + len(before))
            for node in self.nodes
        ]
        end = front + self.length
        after = [Node((end, end + back))] if back else []
        pictures = tuple(shifted(span, front) for span in self.picture_spans)
        return PrefixTree(nodes=(*before, *moved_nodes, *after), picture_spans=pictures)

    def regrouped(self, groups: Sequence[Sequence[int]]) -> tuple["PrefixTree", list[Tensor]]:
        """Build a tree of new nodes, each with the tokens of a group of nodes that follow each other on a path. A group
        is below the one that ends with the parent of its first node. Return also the places in this tree of each new
        node's tokens."""
        number_of: dict[int | None, int] = {group[-1]: number for number, group in enumerate(groups)}
        parents = [number_of.get(self.nodes[group[0]].parent) for group in groups]
        places = [self._places(group) for group in groups]
        nodes = end_to_end(list(map(len, places)), parents)
        grouped = zip(nodes, groups, strict=True)
        spans = [shifted(span, node.span[0]) for node, group in grouped for span in self.picture_spans_in(*group)]
        return PrefixTree(nodes=nodes, picture_spans=tuple(spans)), places

    def after(self, first: int) -> tuple[Span, ...]:
        """Return the spans of the tokens from `first` on."""
        return ((first, self.length),)

    def dense_mask(
        self, device: torch.device, attention_span: AttentionSpan = FULL, queries: Sequence[Span] | None = None
    ) -> Tensor:
        """Return the mask, bool (1, 1, S, T): true where the token of the row attends to the token of the column.
        `queries` are the spans of the rows' tokens; None means all tokens."""
        mask_ST = self.visibility(attention_span).mask(queries or self.after(0))
        return moved(mask_ST[None, None], device)


def end_to_end(sizes: Sequence[int], parents: Sequence[int | None]) -> tuple[Node, ...]:
    """Lay out nodes of these sizes, given in the order of a walk."""
    stops = accumulate(sizes)
    return tuple(Node((stop - size, stop), parent) for size, stop, parent in zip(sizes, stops, parents, strict=True))


def groups_tree(*groups: Sequence[int], picture_spans: Sequence[Span] = ()) -> PrefixTree:
    """Build a tree from groups, each given by the number of tokens of its prompt and of the completions after it."""
    sizes: list[int] = []
    parents: list[int | None] = []
    for lengths in groups:
        parents += [len(sizes) if place else None for place in range(len(lengths))]
        sizes += lengths
    return PrefixTree(nodes=end_to_end(sizes, parents), picture_spans=tuple(picture_spans))


def shifted(span: Span, by: int) -> Span:
    """Return a span that is so many places further on."""
    return span[0] + by, span[1] + by


class ByAttentionSpan(Generic[Made]):
    """What a form of attention derives from a tree, built once for each attention span that differs there."""

    def __init__(self, tree: PrefixTree, make: Callable[[AttentionSpan], Made]):
        self.tree = tree
        self.make = cache(make)

    def prepare(self, attention_span: AttentionSpan) -> Made:
        """Return what layers with this attention span need."""
        return self.make(self.tree.simplest(attention_span))
