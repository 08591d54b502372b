"""Cutting a prefix tree into microbatches of a budget. A subtree that does not fit is cut below its first node: a pass
of its own computes the path down to that node, and the microbatches below continue it. The cuts follow the walk of the
tree, depth first, so that what is kept at a time is one path and one microbatch.

An entry is what stays in one microbatch: a completion, or the answers of an example.
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from tiercel.packing.tree import PrefixTree


@dataclass(frozen=True, slots=True)
class PrefixCut:
    """A pass over the node `node`, after the path of its ancestors, for the bins from `first` up to `stop`."""

    node: int
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Bin:
    """The entries of a microbatch. Passes of their own computed the path down to the node `below`, None if none did."""

    entries: tuple[int, ...]
    below: int | None = None


@dataclass(slots=True)
class Cuts:
    """Bins that are computed together, and the passes over the prefixes that they continue, outermost first."""

    bins: list[Bin] = field(default_factory=list)
    prefixes: list[PrefixCut] = field(default_factory=list)


def bins_in_order(sizes: Sequence[int], budget: int) -> list[Cuts]:
    """Fill bins with entries of these sizes, which share nothing, one after the other."""
    bins: list[list[int]] = []
    filled = budget
    for entry, size in enumerate(sizes):
        filled += size
        if filled > budget:
            bins.append([])
            filled = size
        bins[-1].append(entry)
    return [Cuts(bins=[Bin(tuple(each))]) for each in bins]


class TreeCutter:
    """Cuts a tree. The sequences of the entry number i end with the nodes `ends[i]`; no entry has more tokens than
    `budget`. Unless `continues`, each bin computes the whole paths of its entries."""

    def __init__(self, tree: PrefixTree, ends: Sequence[Sequence[int]], budget: int, *, continues: bool):
        self.tree, self.budget, self.continues = tree, budget, continues
        self.nodes = [frozenset(node for end in each for node in tree.path(end)) for each in ends]

    def size(self, nodes: AbstractSet[int]) -> int:
        """Count the tokens of nodes."""
        return sum(stop - start for start, stop in (self.tree.nodes[node].span for node in nodes))

    def cuts(self) -> list[Cuts]:
        """Return what is computed together, in the order of the walk."""
        found = []
        for part in self._parts(range(len(self.nodes)), None):
            self._add(cuts := Cuts(), None, *part)
            found += [cuts] if self.continues else [Cuts(bins=[each]) for each in cuts.bins]
        return found

    def _add(self, cuts: Cuts, parent: int | None, child: int | None, entries: Sequence[int]) -> None:
        """Add a part of the entries below `parent`."""
        if child is None:
            cuts.bins.append(Bin(tuple(sorted(entries)), parent if self.continues else None))
            return
        place, first = len(cuts.prefixes), len(cuts.bins)
        cuts.prefixes.append(PrefixCut(child, first, first))
        for part in self._parts(entries, child):
            self._add(cuts, child, *part)
        cuts.prefixes[place] = PrefixCut(child, first, len(cuts.bins))

    def _parts(self, entries: Sequence[int], parent: int | None) -> Iterator[tuple[int | None, list[int]]]:
        """Yield entries below `parent` that fit into one bin, with None, and those of a child that do not fit, with the
        child. Entries that end at `parent` have no tokens below it, so they go with the first of the others."""
        path = frozenset[int]() if parent is None else frozenset(self.tree.path(parent))
        held, filled = [entry for entry in entries if self.nodes[entry] <= path], path
        for child, members in self._by_child(entries, path, parent):
            nodes = path.union(*(self.nodes[entry] for entry in members))
            fits = self.size(nodes) <= self.budget
            if filled > path and not (fits and self.size(filled | nodes) <= self.budget):
                yield None, held
                held, filled = [], path
            if fits:
                held, filled = held + members, filled | nodes
            else:
                yield child, held + members
                held = []
        if held:
            yield None, held

    def _by_child(
        self, entries: Sequence[int], path: AbstractSet[int], parent: int | None
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield the entries of each child, in the order of the walk. One that is in several children stands alone."""
        found: dict[int, list[int]] = {}
        firsts = {entry: min(below) for entry in entries if (below := self.nodes[entry] - path)}
        for entry, first in sorted(firsts.items(), key=lambda each: each[1]):
            children = [node for node in self.nodes[entry] if self.tree.nodes[node].parent == parent]
            found.setdefault(first if len(children) == 1 else -1 - entry, []).append(entry)
        yield from found.items()
