"""Cutting a prefix tree into microbatches of a budget. A subtree that does not fit is cut below its first node: a pass
of its own computes the path down to that node, and the microbatches below continue it. The cuts follow the walk of the
tree, depth first, so that what is kept at a time is one path and one microbatch.
"""

from collections.abc import Iterator, Sequence
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
    """The rows of a microbatch. Passes of their own computed the path down to the node `below`, None if none did."""

    rows: tuple[int, ...]
    below: int | None = None


@dataclass(slots=True)
class Cuts:
    """Bins that are computed together, and the passes over the prefixes that they continue, outermost first."""

    bins: list[Bin] = field(default_factory=list)
    prefixes: list[PrefixCut] = field(default_factory=list)


class TreeCutter:
    """Cuts a tree whose row number i ends with the node `ends[i]`. No row has more tokens than `budget`. Unless
    `continues`, each bin computes its rows' whole paths."""

    def __init__(self, tree: PrefixTree, ends: Sequence[int], budget: int, *, continues: bool):
        self.tree, self.budget, self.continues = tree, budget, continues
        self.rows_at: dict[int, list[int]] = {}
        for row, end in enumerate(ends):
            self.rows_at.setdefault(end, []).append(row)
        self.children: dict[int | None, list[int]] = {}
        for number, node in enumerate(tree.nodes):
            self.children.setdefault(node.parent, []).append(number)

    def cuts(self) -> list[Cuts]:
        """Return what is computed together, in the order of the walk."""
        found = []
        for siblings in self._fitting(None, 0):
            if isinstance(siblings, list):
                found.append(Cuts(bins=[Bin(self._rows(siblings))]))
                continue
            cuts = Cuts()
            self._cut_below(siblings, cuts)
            found += [cuts] if self.continues else [Cuts(bins=[each]) for each in cuts.bins]
        return found

    def _cut_below(self, node: int, cuts: Cuts) -> None:
        place, first = len(cuts.prefixes), len(cuts.bins)
        below = node if self.continues else None
        cuts.prefixes.append(PrefixCut(node, first, first))
        own = self.rows_at.get(node, [])  # they have no tokens below the node, so any bin has room for them
        for siblings in self._fitting(node, self.tree.length_to(node)):
            if isinstance(siblings, list):
                cuts.bins.append(Bin(tuple(sorted((*own, *self._rows(siblings)))), below))
                own = []
            else:
                self._cut_below(siblings, cuts)
        if own:
            cuts.bins.append(Bin(tuple(own), below))
        cuts.prefixes[place] = PrefixCut(node, first, len(cuts.bins))

    def _fitting(self, parent: int | None, before: int) -> Iterator[list[int] | int]:
        """Yield lists of children whose subtrees fit into one bin, and children that do not fit by themselves.
        `before` is the number of tokens on their path."""
        siblings: list[int] = []
        filled = before
        for child in self.children.get(parent, []):
            size = self._size(child)
            if siblings and filled + size > self.budget:
                yield siblings
                siblings, filled = [], before
            if before + size <= self.budget:
                siblings.append(child)
                filled += size
            else:
                yield child
        if siblings:
            yield siblings

    def _size(self, node: int) -> int:
        """Count the tokens of a subtree."""
        return self.tree.stops[node] - self.tree.nodes[node].span[0]

    def _rows(self, siblings: Sequence[int]) -> tuple[int, ...]:
        """Return the rows that end in the subtrees of siblings, in their own order."""
        numbers = (each for node in siblings for each in self._subtree(node))
        return tuple(sorted(row for number in numbers for row in self.rows_at.get(number, ())))

    def _subtree(self, node: int) -> Iterator[int]:
        stop = self.tree.stops[node]
        while node < len(self.tree.nodes) and self.tree.nodes[node].span[0] < stop:
            yield node
            node += 1
