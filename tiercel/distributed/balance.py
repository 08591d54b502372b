"""Balance the work of a step: items move from ranks with more work to ranks with less, until it is nearly equal."""

from collections.abc import Sequence
from dataclasses import dataclass

TOLERANCE = 0.05  # fraction of the mean load; for a smaller difference a move costs more than it saves


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """Describes the move of an item to another rank."""

    item: int  # its position among the sender's own items
    sender: int
    receiver: int


def balancing_moves(costs_of_ranks: Sequence[Sequence[int]], together: int = 1) -> list[Move]:
    """Choose moves, each from the rank with the most work to the rank with the least, until no such move helps.

    `costs_of_ranks` has, for each rank, the tokens of its items. Every rank computes the same moves from it. Few items
    move, because each starts at its own rank. `together` is how many consecutive ranks compute their items together;
    these count as one rank, and the first of them receives.
    """
    items = [(cost, rank, item) for rank, costs in enumerate(costs_of_ranks) for item, cost in enumerate(costs)]
    learners = range(len(costs_of_ranks) // together)
    held = [[entry for entry in items if entry[1] // together == learner] for learner in learners]
    loads = [sum(cost for cost, _, _ in entries) for entries in held]
    slack = TOLERANCE * sum(loads) / max(1, len(loads))
    while True:
        fullest = max(learners, key=lambda learner: (loads[learner], -learner))
        emptiest = min(learners, key=lambda learner: (loads[learner], learner))
        gap = loads[fullest] - loads[emptiest]
        movable = [entry for entry in held[fullest] if 0 < entry[0] < gap]
        if gap <= slack or not movable:
            break
        best = min(movable, key=lambda entry: (abs(gap - 2 * entry[0]), entry))
        held[fullest].remove(best)
        held[emptiest].append(best)
        loads[fullest] -= best[0]
        loads[emptiest] += best[0]
    moves = [
        Move(item=item, sender=home, receiver=learner * together)
        for learner, entries in enumerate(held)
        for _, home, item in entries
        if home // together != learner
    ]
    return sorted(moves, key=lambda move: (move.sender, move.receiver, move.item))
