"""Building the prefix tree of a microbatch: sequences that begin alike are joined, so that a picture or a text that
several rows begin with is computed once. Shape suffixes: docs/shapes.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from tiercel.models.layers.attention_span import Span
from tiercel.packing.tree import shifted
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
        return self._within(0, place), self._within(place, len(self))

    def _within(self, start: int, stop: int) -> "Segment":
        return Segment(
            ids_L=self.ids_L[start:stop],
            positions_DL=self.positions_DL[:, start:stop],
            pictures=tuple(
                replace(each, span=shifted(each.span, -start)) for each in self.pictures if start <= each.span[0] < stop
            ),
            picture_spans=tuple(shifted(span, -start) for span in self.picture_spans if start <= span[0] < stop),
        )


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

    def cut(self, place: int) -> None:
        """Keep the tokens before `place`; the others become the only child, with all that was below."""
        self.tokens, rest = self.tokens.cut(place)
        self.children, self.ends = Siblings(Branch(rest, self.children, self.ends)), []


class Siblings:
    """Nodes with the same parent, found by the tokens that another one must share to be joined. A cut leaves these
    tokens together."""

    def __init__(self, *branches: Branch):
        self.branches: list[Branch] = []
        self._by_start: dict[int, dict[bytes, list[Branch]]] = {}  # by how many tokens, and which
        for branch in branches:
            self.add(branch)

    def add(self, branch: Branch) -> None:
        length = min(len(branch.tokens), SHORTEST)
        self.branches.append(branch)
        self._by_start.setdefault(length, {}).setdefault(branch.tokens.start(length), []).append(branch)

    def nearest(self, tokens: Segment) -> tuple[Branch | None, int]:
        """Return the node that shares most with the tokens, if joining them pays, and how many they share."""
        best, most = None, 0
        for length, by_start in self._by_start.items():
            for branch in by_start.get(tokens.start(length), ()) if length <= len(tokens) else ():
                shared = common_length(branch.tokens, tokens)
                if shared > most and (shared >= SHORTEST or shared == len(branch.tokens)):
                    best, most = branch, shared
        return best, most


class TreeBuilder:
    """The nodes of sequences that were added one by one. Without `family`, nothing is shared but the node that a
    sequence continues."""

    def __init__(self, family: PictureFamily | None):
        self.family = family
        self.roots = Siblings()
        self.length = 0

    def add(self, above: Branch | None, tokens: Segment) -> Branch:
        """Add tokens that follow a node, or are the first of their sequence, and return the node at whose end they
        end."""
        while above is None or len(tokens):
            siblings = self.roots if above is None else above.children
            branch, shared = siblings.nearest(tokens) if self.family is not None else (None, 0)
            if branch is None:
                siblings.add(branch := Branch(tokens))
                self.length += len(tokens)
                return branch
            if shared < len(branch.tokens):
                branch.cut(shared)
            above, tokens = branch, tokens.cut(shared)[1]
        return above

    def walk(self) -> Iterator[tuple[Branch, int | None]]:
        """Yield each node with the number of its parent, depth first."""
        waiting: list[tuple[Branch, int | None]] = [(root, None) for root in reversed(self.roots.branches)]
        number = 0
        while waiting:
            branch, parent = waiting.pop()
            yield branch, parent
            waiting += [(child, number) for child in reversed(branch.children.branches)]
            number += 1
