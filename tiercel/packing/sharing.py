"""Building the prefix tree of a microbatch: sequences that begin alike are joined, so that a picture or a text that
several rows begin with is computed once. Shape suffixes: docs/shapes.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from tiercel.models.layers.attention_span import Span
from tiercel.packing.tree import Node, PrefixTree
from tiercel.types import EncodedImage, ImagePlan

SHORTEST = 64  # tokens that a cut must share; on a CPU it pays from 24 on (benchmarks/shared_length.py)


class PictureFamily(Protocol):
    """The part of a family of models that finds pictures among tokens."""

    def is_placeholder(self, token_ids: Tensor) -> Tensor: ...

    def image_token_ids(self, plan: ImagePlan) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class PlacedPictures:
    """Pictures and the span of their placeholders, which a tree never cuts."""

    span: Span
    images: tuple[EncodedImage, ...]

    @property
    def identity(self) -> tuple[object, ...]:
        return (self.span, *((image.sha256, image.plan) for image in self.images))


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Consecutive tokens of a sequence, with everything that their embeddings and positions depend on."""

    ids_L: Tensor
    positions_DL: Tensor
    pictures: tuple[PlacedPictures, ...] = ()  # spans count from the first of the tokens
    picture_spans: tuple[Span, ...] = ()  # of tokens that see each other

    def __len__(self) -> int:
        return len(self.ids_L)

    def start(self, count: int) -> bytes:
        """Return the first ids as a key."""
        return self.ids_L[:count].numpy().tobytes()

    def cut(self, place: int) -> tuple["Segment", "Segment"]:
        """Return the tokens before and from `place` on."""
        parts = []
        for start, stop in ((0, place), (place, len(self))):
            pictures = [each for each in self.pictures if start <= each.span[0] < stop]
            parts.append(
                Segment(
                    ids_L=self.ids_L[start:stop],
                    positions_DL=self.positions_DL[:, start:stop],
                    pictures=tuple(replace(each, span=_moved(each.span, -start)) for each in pictures),
                    picture_spans=tuple(_moved(span, -start) for span in self.picture_spans if start <= span[0] < stop),
                )
            )
        return parts[0], parts[1]


def located(
    token_ids_L: Tensor, images: Sequence[EncodedImage], family: PictureFamily | None
) -> tuple[PlacedPictures, ...]:
    """Find the placeholders of each picture, of which `images` may have more than the tokens show. Without `family`,
    the pictures are taken as one that fills the whole sequence."""
    if not images:
        return ()
    if family is None:
        return (PlacedPictures((0, len(token_ids_L)), tuple(images)),)
    places = family.is_placeholder(token_ids_L).nonzero()[:, 0].tolist()
    found, first = [], 0
    for image in images:
        ids = torch.tensor(family.image_token_ids(image.plan), dtype=torch.int64)
        count = int(family.is_placeholder(ids).sum())
        if first + count > len(places):
            break
        found.append(PlacedPictures((places[first], places[first + count - 1] + 1), (image,)))
        first += count
    assert first == len(places), f"{len(places)} placeholders, but the pictures have {first}"
    return tuple(found)


def common_length(one: Segment, other: Segment) -> int:
    """Count the leading tokens that are equal in ids, positions and pictures, up to a place where both can be cut."""
    length = min(len(one), len(other))
    differs_L = one.ids_L[:length] != other.ids_L[:length]
    differs_L |= (one.positions_DL[:, :length] != other.positions_DL[:, :length]).any(0)
    if bool(differs_L.any()):
        length = int(differs_L.int().argmax())
    different = {each.identity for each in one.pictures} ^ {each.identity for each in other.pictures}
    for each in (*one.pictures, *other.pictures):
        start, stop = each.span
        if start < length and (each.identity in different or length < stop):
            length = start
    return length


@dataclass(eq=False, slots=True)
class Branch:
    """A node that is still being built."""

    tokens: Segment
    children: "Siblings" = field(default_factory=lambda: Siblings())
    ends: list[int] = field(default_factory=list)  # the sequences that end with this node


class Siblings:
    """Nodes with the same parent, found by the tokens that another one must share to be joined."""

    def __init__(self, *branches: Branch):
        self.branches: list[Branch] = []
        self._by_start: dict[bytes, list[Branch]] = {}
        self._lengths: set[int] = set()  # of the keys
        for branch in branches:
            self.add(branch)

    def add(self, branch: Branch) -> None:
        length = min(len(branch.tokens), SHORTEST)
        self.branches.append(branch)
        self._lengths.add(length)
        self._by_start.setdefault(branch.tokens.start(length), []).append(branch)

    def replace(self, branch: Branch, other: Branch) -> None:
        """Put `other`, whose tokens begin those of `branch`, in its place."""
        for branches in (self.branches, self._by_start[branch.tokens.start(min(len(branch.tokens), SHORTEST))]):
            branches[branches.index(branch)] = other

    def nearest(self, tokens: Segment) -> tuple[Branch | None, int]:
        """Return the node that shares most with the tokens, if joining them pays, and how many they share."""
        best, most = None, 0
        for length in self._lengths:
            for branch in self._by_start.get(tokens.start(length), ()) if length <= len(tokens) else ():
                shared = common_length(branch.tokens, tokens)
                if shared > most and (shared >= SHORTEST or shared == len(branch.tokens)):
                    best, most = branch, shared
        return best, most


class TreeBuilder:
    """The nodes of sequences that were added one by one. Without `family`, only the continuations of one prompt share
    anything, and they share the prompt."""

    def __init__(self, family: PictureFamily | None):
        self.family = family
        self.roots = Siblings()
        self.length = 0

    def add_prompt(self, tokens: Segment) -> Branch:
        """Add a sequence that others continue, and return the node at whose end it ends."""
        return self._add(self.roots, tokens)

    def add(self, prompt: Branch, tokens: Segment, number: int) -> None:
        """Add what follows a prompt as the sequence `number`."""
        self._add(prompt.children, tokens).ends.append(number)

    def _add(self, siblings: Siblings, tokens: Segment) -> Branch:
        while True:
            branch, shared = siblings.nearest(tokens) if self.family is not None else (None, 0)
            if branch is None:
                siblings.add(made := Branch(tokens))
                self.length += len(tokens)
                return made
            if shared < len(branch.tokens):
                branch = _cut(branch, shared, siblings)
            if shared == len(tokens):
                return branch
            siblings, tokens = branch.children, tokens.cut(shared)[1]

    def walk(self) -> Iterator[tuple[Branch, int | None]]:
        """Yield each node with the number of its parent, depth first."""
        waiting: list[tuple[Branch, int | None]] = [(root, None) for root in reversed(self.roots.branches)]
        number = 0
        while waiting:
            branch, parent = waiting.pop()
            yield branch, parent
            waiting += [(child, number) for child in reversed(branch.children.branches)]
            number += 1


def _cut(branch: Branch, place: int, siblings: Siblings) -> Branch:
    """Cut a node in two, and return the upper part. The lower part keeps its identity, because whoever holds a node
    means the end of its tokens."""
    first, rest = branch.tokens.cut(place)
    above = Branch(first)
    siblings.replace(branch, above)
    branch.tokens = rest
    above.children.add(branch)
    return above


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltTree:
    """A tree with its tokens."""

    tree: PrefixTree
    token_ids_T: Tensor
    positions_DT: Tensor
    images: tuple[EncodedImage, ...]  # in the order of their placeholders
    image_nodes: tuple[int, ...]  # the number of each image's node
    ends: dict[int, int]  # the number of the node with which each sequence ends


def built(builder: TreeBuilder) -> BuiltTree:
    """Lay the nodes end to end."""
    nodes: list[Node] = []
    pictures: list[Span] = []
    branches = list(builder.walk())
    start = 0
    for branch, parent in branches:
        nodes.append(Node((start, start + len(branch.tokens)), parent))
        pictures += [_moved(span, start) for span in branch.tokens.picture_spans]
        start += len(branch.tokens)
    tokens = [branch.tokens for branch, _ in branches]
    images = [
        (number, image) for number, each in enumerate(tokens) for found in each.pictures for image in found.images
    ]
    return BuiltTree(
        tree=PrefixTree(nodes=tuple(nodes), picture_spans=tuple(pictures)),
        token_ids_T=torch.cat([each.ids_L for each in tokens]),
        positions_DT=torch.cat([each.positions_DL for each in tokens], dim=1),
        images=tuple(image for _, image in images),
        image_nodes=tuple(number for number, _ in images),
        ends={sequence: number for number, (branch, _) in enumerate(branches) for sequence in branch.ends},
    )


def _moved(span: Span, by: int) -> Span:
    return span[0] + by, span[1] + by
