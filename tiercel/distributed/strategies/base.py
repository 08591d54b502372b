"""Define how ranks share the work of training: the methods of a strategy, and the class of each name.

A strategy owns the trained weights: it wraps the learner, sums gradients, updates weights, and gathers them for saving.
All strategies give the same numbers on any number of ranks, to rounding.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from tiercel.config.schema import BaseRecipe
from tiercel.distributed.ranks import Ranks
from tiercel.distributed.strategies.replicated import Replicated
from tiercel.distributed.strategies.shard_files import SavedTensors
from tiercel.distributed.strategies.sharded import Sharded
from tiercel.distributed.strategies.zero import Zero
from tiercel.models.policy import Policy


class Strategy(Protocol):
    """Trains weights that ranks share. All ranks make the same calls in the same order."""

    ranks: Ranks
    learner: Any  # the wrapped learner; only its forward may be called, unless passes are private
    # Private passes have no collectives, so ranks may make different numbers of them and call parts of the learner.
    passes_are_private: bool

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of the next update."""

    def zero_gradients(self) -> None:
        """Drop all gradients."""

    def discard_gradients(self) -> None:
        """Drop all gradients of an update that is left out because some are not finite."""

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradient of this rank's share of the loss. The sum of all shares is the loss of the minibatch.
        `is_last` means that this is the last backward pass of the update on this rank."""

    def reduce_gradients(self) -> float:
        """Sum gradients over the ranks. Return the L2 norm of the sum, which is not finite if a gradient is not."""

    def gradients(self) -> dict[str, Tensor]:
        """Return the summed gradient before clipping, whole and on the CPU, by parameter; empty except on the first
        rank."""

    def update(self, norm: float, max_norm: float) -> bool:
        """Clip the gradient and update the weights. Return False if a float16 gradient overflowed: then the weights are
        not changed and the loss scale is lowered."""

    @property
    def loss_scale(self) -> float:
        """Return the loss scale of float16; 1 for other dtypes."""

    def trained_weights(self) -> dict[str, Tensor]:
        """Return the trained parameters, whole and on the CPU, by name; empty except on the first rank."""

    def model_weights(self) -> dict[str, Tensor]:
        """Return all parameters and buffers of the model, whole and on the CPU; empty except on the first rank."""

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return step counts and moments as `NAME.step`, `NAME.exp_avg` and `NAME.exp_avg_sq`, whole and on the CPU;
        empty except on the first rank."""

    def scaler_state(self) -> dict[str, Any]:
        """Return the state of the loss scale, as JSON."""

    def restore(self, tensors: SavedTensors, scaler_state: Mapping[str, Any]) -> None:
        """Restore the results of `optimizer_tensors`, of which the strategy reads what it needs, and of
        `scaler_state`."""

    def moved(self, change: Callable[[Tensor], Tensor]) -> AbstractContextManager[None]:
        """Replace each trained weight by `change(weight)`. At the end all weights are restored, bit for bit. Every rank
        makes the same change."""

    def as_reference(self) -> AbstractContextManager[None]:
        """Make the policy compute with the weights of the reference: those of the start of the run, or those that the
        reference has moved to."""

    def whole_policy(self) -> AbstractContextManager[None]:
        """Gather all weights of the policy on every rank, so that each can sample by itself."""


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
    """Build the strategy of that name. `start` has whole weights of the KL reference that differ from the policy's, by
    name; the strategy keeps its share of them. Raises EnvironmentProblem if a package is missing."""
    return STRATEGIES[name](recipe, ranks, policy, learner, start)
