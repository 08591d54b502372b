"""Cutting a prefix tree into microbatches of a budget. A subtree that does not fit is cut below its first node: a pass
of its own computes the path down to that node, and the microbatches below continue it. The cuts follow the walk of the
tree, depth first, so that what is kept at a time is one path and one microbatch.

An entry is what stays in one microbatch: a completion, or the answers of an example.
"""

from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from tiercel.packing.tree import PrefixTree


@dataclass(frozen=True, slots=True)
class Bin:
    """The entries of a microbatch, and the path of nodes above it that passes of their own compute."""

    entries: tuple[int, ...]
    above: tuple[int, ...] = ()


def together(bins: Iterable[Bin]) -> list[list[Bin]]:
    """Divide bins, given in the order of the walk, into runs that continue the same pass over a root."""
    runs: list[list[Bin]] = []
    for each in bins:
        if not each.above or not runs or runs[-1][0].above[:1] != each.above[:1]:
            runs.append([])
        runs[-1].append(each)
    return runs


def prefix_cuts(bins: Sequence[Bin]) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Return the passes that bins, given in the order of the walk, continue, outer ones before those below them: the
    path to the node of the pass, and the numbers of the first bin that continues it and of the first after that."""
    spans: dict[tuple[int, ...], tuple[int, int]] = {}
    for number, each in enumerate(bins):
        for depth in range(len(each.above)):
            path = each.above[: depth + 1]
            first, _ = spans.get(path, (number, number))
            spans[path] = first, number + 1
    return ((path, first, stop) for path, (first, stop) in spans.items())


class TreeCutter:
    """Cuts a tree. The sequences of the entry number i end with the nodes `ends[i]`; no entry has more tokens than
    `budget`."""

    def __init__(self, tree: PrefixTree, ends: Sequence[Sequence[int]], budget: int):
        self.tree, self.budget = tree, budget
        self.nodes = [frozenset(node for end in each for node in tree.path(end)) for each in ends]

    def size(self, nodes: AbstractSet[int]) -> int:
        """Count the tokens of nodes."""
        return sum(self.tree.nodes[node].size for node in nodes)

    def bins(self) -> Iterator[Bin]:
        """Yield the bins of all entries, in the order of the walk."""
        return self._bins(range(len(self.nodes)), ())

    def _bins(self, entries: Sequence[int], above: tuple[int, ...]) -> Iterator[Bin]:
        """Yield the bins of entries below a path. Those of a child that do not fit into one bin have bins below that
        child. Entries that end with the path have no tokens below it, so they go with the first of the others."""
        path = frozenset(above)
        room = rest = self.budget - self.size(path)
        held, filled = [entry for entry in entries if self.nodes[entry] <= path], set[int]()
        for child, members in self._by_child(entries, above):
            nodes = frozenset[int]().union(*(self.nodes[entry] for entry in members)) - path
            fits = self.size(nodes) <= room
            if filled and not (fits and self.size(nodes - filled) <= rest):
                yield Bin(tuple(sorted(held)), above)
                held, filled, rest = [], set(), room
            if fits:
                rest -= self.size(nodes - filled)
                filled |= nodes
                held += members
            else:
                yield from self._bins(held + members, (*above, child))
                held = []
        if held:
            yield Bin(tuple(sorted(held)), above)

    def _by_child(self, entries: Sequence[int], above: tuple[int, ...]) -> Iterator[tuple[int, list[int]]]:
        """Yield the entries of each child, in the order of the walk. One that is in several children stands alone."""
        parent = above[-1] if above else None
        found: dict[int, list[int]] = {}
        firsts = {entry: min(below) for entry in entries if (below := self.nodes[entry].difference(above))}
        for entry, first in sorted(firsts.items(), key=lambda each: each[1]):
            children = [node for node in self.nodes[entry] if self.tree.nodes[node].parent == parent]
            found.setdefault(first if len(children) == 1 else -1 - entry, []).append(entry)
        yield from found.items()
