"""The policy that is trained, with all that its passes and its updates take. Built once per run (build.py).

N scored tokens of a microbatch.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from torch import Tensor

from tiercel.algorithms.kl import Kl, KlTerm
from tiercel.distributed.strategy import Strategy
from tiercel.learner.batch import AdvantageGroup, PolicyUnit
from tiercel.models.reference import move_reference
from tiercel.training.forward import Passes
from tiercel.training.teaching import Teaching


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer(Passes):
    """The policy that is trained, and the strategy that applies its updates."""

    strategy: Strategy
    max_grad_norm: float
    kl: KlTerm | None  # None: nothing holds the policy near the reference
    teacher: Teaching | None = None

    def as_reference(self) -> AbstractContextManager[None]:
        """Make the policy compute with all weights of the reference."""
        return self.strategy.as_reference()

    def reference_logprobs(self, units: Sequence[PolicyUnit]) -> list[list[Tensor]]:
        """Compute the reference's logprobs (N,) for each microbatch of each unit, through the policy's own path."""
        with self.as_reference():
            return [[scores.logprobs_N for scores in self.scores(unit, of_reference=True)] for unit in units]

    @contextmanager
    def training_mode(self) -> Iterator[None]:
        """Dropout and activation checkpointing are on inside."""
        self.learner.train()
        try:
            yield
        finally:
            self.learner.eval()

    def taught(self, groups: Sequence[AdvantageGroup]) -> Sequence[AdvantageGroup]:
        """Add what the teacher says of every completion, where there is one. All ranks call it."""
        return groups if self.teacher is None else self.teacher.taught(groups)

    def move_reference(self, kl: Kl, step: int) -> None:
        """Let a reference that moves follow the policy after `step` updates, where that is due."""
        move_reference(self.policy, kl, step)
