"""How ranks share the work: what a training loop asks of them, and which class answers to which name.

A strategy owns what is trained: it wraps the learner, reduces gradients, updates, and gathers for saving. The same
numbers come out of each, on any number of ranks, to rounding.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from tiercel.config.schema import BaseRecipe
from tiercel.distributed.ranks import Ranks
from tiercel.distributed.replicated import Replicated
from tiercel.distributed.sharded import Sharded
from tiercel.distributed.zero import Zero
from tiercel.models.policy import Policy


class Strategy(Protocol):
    """All ranks make the same calls in the same order."""

    ranks: Ranks
    learner: Any  # the one to call; forward only, unless passes are private
    passes_are_private: (
        bool  # a pass has no collective: ranks may make different numbers, and call parts of the learner
    )

    def set_learning_rate(self, rate: float) -> None: ...

    def zero_gradients(self) -> None: ...

    def leave_out(self) -> None:
        """Forget an update's gradients, which are not finite."""

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Accumulate the gradient of this rank's share of the loss, the sum of whose shares is the minibatch's loss.
        `is_last`: no other backward pass of the update follows on this rank."""

    def reduce_gradients(self) -> float:
        """Sum gradients over the ranks; the L2 norm of the sum, not finite where a number of it is not."""

    def gradients(self) -> dict[str, Tensor]:
        """The summed gradient, before clipping, whole and on the CPU, by parameter; empty but on the first rank."""

    def update(self, norm: float, max_norm: float) -> bool:
        """Clip and step. False where a float16 gradient overflowed: the loss scale is lowered instead."""

    @property
    def loss_scale(self) -> float:
        """Of float16; 1 elsewhere."""

    def trained_weights(self) -> dict[str, Tensor]:
        """Trained parameters, whole and on the CPU, by name; empty but on the first rank."""

    def model_weights(self) -> dict[str, Tensor]:
        """All parameters and buffers of the model, whole and on the CPU; empty but on the first rank."""

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Moments and step counts as `NAME.exp_avg` and so on, whole and on the CPU; empty but on the first rank."""

    def scaler_state(self) -> dict[str, Any]:
        """The loss scale as JSON."""

    def restore(self, tensors: Mapping[str, Tensor], scaler_state: Mapping[str, Any]) -> None:
        """The inverse of `optimizer_tensors` and `scaler_state`; every rank gives all of it."""

    def moved(self, change: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
        """Inside, each trained weight in turn is what `change` made of it; afterwards all are what they were, bit for
        bit. Every rank makes the same change."""

    def as_reference(self) -> AbstractContextManager[None]:
        """Inside, the policy computes what the run started from, or what its reference has moved to."""

    def whole_policy(self) -> AbstractContextManager[None]:
        """Inside, every rank holds all weights of the policy, so that each may sample on its own."""


STRATEGIES: dict[str, type[Replicated] | type[Sharded] | type[Zero]] = {
    "single": Replicated,
    "ddp": Replicated,
    "fsdp2": Sharded,
    "deepspeed": Zero,
}


def build_strategy(
    name: str,
    recipe: BaseRecipe,
    ranks: Ranks,
    policy: Policy,
    learner: Any,
    start: Mapping[str, Tensor] | None = None,
) -> Strategy:
    """`start`: whole weights, by name, that the KL reference has in place of the policy's own; the strategy keeps its
    share of them."""
    return STRATEGIES[name](recipe, ranks, policy, learner, start)
