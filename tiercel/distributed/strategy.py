"""How ranks share the work. One rank so far."""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from tiercel.algorithms import Totals

L = TypeVar("L", bound=nn.Module)


class Strategy(Protocol):
    """What a training loop asks of the ranks; every rank makes the same calls in the same order."""

    rank: int
    world_size: int
    keeps_learner_whole: bool  # parts of the learner may be called apart from its forward

    def wrap(self, learner: L) -> L:
        """The learner, sharded or replicated."""

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of this rank's share of the loss."""

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum gradients over the ranks."""

    def global_totals(self, totals: Totals) -> Totals:
        """Normalisers summed over the ranks."""

    def global_sums(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Metrics summed over the ranks."""


class Single:
    """One process, nothing to agree on."""

    rank = 0
    world_size = 1
    keeps_learner_whole = True

    def wrap(self, learner: L) -> L:
        return learner

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def global_totals(self, totals: Totals) -> Totals:
        return totals

    def global_sums(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        return {name: float(value) for name, value in sums.items()}


STRATEGIES: dict[str, type[Single]] = {"auto": Single, "single": Single}
