"""The policy that is trained, with everything that its passes and updates need. Built once per run by `build_trainer`.

N scored tokens of a microbatch.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from tiercel.algorithms.kl import Kl, penalty_of
from tiercel.config.schema import BaseRecipe, GrpoRecipe
from tiercel.config.strategies import STRATEGY_KINDS
from tiercel.devices import training_device
from tiercel.distributed.context import context_group
from tiercel.distributed.ranks import ALONE, Ranks
from tiercel.distributed.strategies.base import Strategy, build_strategy
from tiercel.distributed.strategies.shard_files import saved_moments
from tiercel.distributed.strategies.sharded import mesh_of
from tiercel.log import logger
from tiercel.models.policy import Policy, build_policy, starting_weights
from tiercel.models.reference import restore_reference, sync_reference
from tiercel.models.vision_cache import VisionStore
from tiercel.models.weights.memory_errors import weight_bytes
from tiercel.models.weights.saving import restore_adapter
from tiercel.packing.batch import AdvantageGroup, MicrobatchUnit
from tiercel.packing.compiling import require_compilable
from tiercel.packing.forward_equivalence_check import prove_where_needed
from tiercel.runs.checkpoints import FoundCheckpoint
from tiercel.runs.progress import waiting
from tiercel.training.distillation.opening import open_teacher
from tiercel.training.distillation.teacher_term import Teaching
from tiercel.training.policy_passes import PolicyPasses, joins_rows, learning_temperature, new_learner
from tiercel.training.strategy_choice import BUDGET, chosen_strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer(PolicyPasses):
    """The policy that is trained, and the strategy that applies its updates."""

    strategy: Strategy
    max_grad_norm: float
    kl: Kl | None  # None: nothing holds the policy near the reference
    teacher: Teaching | None = None

    def as_reference(self) -> AbstractContextManager[None]:
        """Make the policy compute with all weights of the reference."""
        return self.strategy.as_reference()

    def reference_logprobs(self, units: Sequence[MicrobatchUnit]) -> list[list[Tensor]]:
        """Compute the reference's logprobs (N,) for each microbatch of each unit, through the policy's own path."""
        with self.as_reference():
            return [[scores.logprobs_N for scores in self.scores(unit, of_reference=True)] for unit in units]

    @contextmanager
    def training_mode(self) -> Iterator[None]:
        """Turn on dropout and activation checkpointing inside the context, which a whole update belongs into: the
        backward pass computes checkpointed layers again, and must drop the same."""
        self._set_training(True)
        try:
            yield
        finally:
            self._set_training(False)

    def _set_training(self, is_on: bool) -> None:
        self.learner.train(is_on)
        for module in self.policy.model.modules():  # the vision tower is not a part of the learner
            if isinstance(module, LoraLayer):
                module.lora_dropout.train(is_on)

    def with_teacher_terms(self, groups: Sequence[AdvantageGroup]) -> Sequence[AdvantageGroup]:
        """Add what the teacher says about every completion, if there is a teacher. All ranks call it."""
        return groups if self.teacher is None else self.teacher.with_teacher_terms(groups)

    def sync_reference(self, step: int) -> None:
        """Let a moving reference follow the policy after `step` updates, if that is due."""
        if self.kl is not None and self.kl.moves_reference_after(step):
            sync_reference(self.policy, self.kl.sync_mix)


def build_trainer(
    recipe: BaseRecipe,
    found: FoundCheckpoint | None = None,
    ranks: Ranks = ALONE,
    tokens: int | None = None,
) -> Trainer:
    """Load or restore everything that is trained, and log what was chosen. `tokens` is the size of a microbatch if
    the run has chosen it before (strategy_choice.py)."""
    device = training_device()
    ranks.heartbeat.begin("load", found.step if found else 0)
    weights = found.path / "model" if found and recipe.lora is None else None
    choice = chosen_strategy(recipe if tokens is None else recipe.with_values({BUDGET: tokens}), ranks, device)
    kind = STRATEGY_KINDS[choice.strategy]
    require_compilable(recipe, kind)

    def load_and_wrap() -> tuple[Policy, Strategy]:
        policy = build_policy(recipe, device, weights, stays_on_cpu=kind.shards_model)
        prove_where_needed(policy)
        start = starting_weights(policy, recipe, weights)
        if found is not None and policy.peft is not None:
            restore_adapter(policy, found.path / "adapter")
            restore_reference(policy, found.path)
        learner, reasons = new_learner(policy, recipe, device, kind, context)
        for reason in reasons:
            logger.info(reason)
        return policy, build_strategy(kind.name, recipe, ranks, policy, learner, start)

    context = context_group(ranks, recipe.train.context_parallel, device)
    if kind.loads_in_turns:
        mesh_of(recipe, ranks, device)  # makes its process groups, which all ranks must make at once
    with waiting(f"loading {recipe.model.path}{_size_of(weights or Path(expanduser(recipe.model.path)))}"):
        # While sharding, a rank holds the whole model; in turns, a machine's memory holds it only once.
        policy, strategy = ranks.in_turns(load_and_wrap) if kind.loads_in_turns else load_and_wrap()
    if found is not None:
        strategy.restore(saved_moments(found.path), found.state["loss_scaler"])
    trainer = Trainer(
        policy=policy,
        learner=strategy.learner,
        vision=VisionStore(policy, recipe.model.vision_cache_bytes),
        ranks=ranks,
        passes_are_private=strategy.passes_are_private and context is None,
        context=context,
        temperature=learning_temperature(recipe),
        max_tokens=choice.tokens,
        joins_rows=joins_rows(recipe),
        strategy=strategy,
        max_grad_norm=recipe.optim.max_grad_norm,
        kl=penalty_of(recipe.algorithm.kl) if isinstance(recipe, GrpoRecipe) else None,
        teacher=open_teacher(recipe, policy.family, ranks) if isinstance(recipe, GrpoRecipe) else None,
    )
    policy.model.eval()  # PEFT makes its dropout in training mode
    trainer.learner.eval()
    if not strategy.passes_are_private:
        # FSDP2 treats the module that is called first as the root, so the sampler must not call first.
        with torch.no_grad():
            trainer.learner(trainer.empty_examples().batches[0].packed, None, trainer.temperature)
    return trainer


def _size_of(checkpoint: Path) -> str:
    """Format the size of a local checkpoint's weights for a message."""
    with suppress(OSError):  # loading them reports it
        return f", {weight_bytes(checkpoint) / 1e9:.1f} GB" if checkpoint.is_dir() else ""
    return ""
