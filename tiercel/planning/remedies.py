"""What to change in a recipe that does not fit: a search over the keys that do not change a run's result.

Every combination is judged by the memory and the seconds from `options`, and by the recipe's rules.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import Any

from tiercel.config.conflicts.rules import rule_problems
from tiercel.config.deepspeed import deepspeed_problems
from tiercel.config.schema import Checkpointing, GrpoRecipe, Recipe
from tiercel.config.strategies import STRATEGY_KINDS
from tiercel.config.trained_parts import keeps_start
from tiercel.planning.devices import Machine
from tiercel.planning.memory import Measured, engine_obstacle
from tiercel.planning.options import MARGIN, Option, Subject, measure, option

MORE_RANKS = (1, 2, 4, 8, 16, 32)
ENGINE_RANKS = (1, 2, 4, 8)
ENGINE_SHARES = tuple(twentieths / 20 for twentieths in range(2, 20))
CHANGE_COST = 0.05  # a proposal's penalty for each changed key, as a share of a step's seconds
# This key counts as six: it needs another package, and its logprobs come from another program.
KEY_COSTS = {"rollout.engine": 6}

STRATEGY = "train.strategy"
TOKENS = "learner.max_tokens_per_microbatch"
CHECKPOINTING = "learner.gradient_checkpointing"
RECOMPUTING: tuple[Checkpointing, ...] = (False, "selective", "full")  # from the most memory to the least
OFFLOAD_WEIGHTS, OFFLOAD_OPTIMIZER = "train.deepspeed.offload_parameters", "train.deepspeed.offload_optimizer"
REFERENCE = "model.reference"
STAGE = "train.deepspeed.stage"
ENGINE, TENSOR_PARALLEL = "rollout.engine", "rollout.vllm.tensor_parallel"
SHARE, SLEEP = "rollout.vllm.gpu_memory_utilization", "rollout.vllm.sleep_level"

Changes = Mapping[str, Any]  # new values by key of the recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedy:
    """Keys to write, perhaps on more ranks, so that the recipe fits."""

    changes: Changes
    machine: Machine
    option: Option

    def words(self, ranks: int) -> str:
        """Return what to write as one line, with the number of GPUs if it is not `ranks`."""
        more = [f"{self.machine.ranks} GPUs"] if self.machine.ranks != ranks else []
        return ", ".join([*more, *([words(self.changes)] if self.changes else [])])

    @property
    def cost(self) -> tuple[float, int]:
        """Return the cost: the seconds of a step, raised by the number of changes, then that number, which alone counts
        if there are no seconds."""
        keys = sum(KEY_COSTS.get(key, 1) for key in self.changes)
        return sum(self.option.seconds.values()) * (1 + CHANGE_COST * keys), keys


def words(changes: Changes) -> str:
    """Format keys and values as in a recipe, on one line."""
    return ", ".join(f"{key}: {written(value)}" for key, value in changes.items())


def written(value: Any) -> str:
    """Format a value as in a recipe."""
    return json.dumps(value).strip('"')


def find_remedy(
    subject: Subject, measured: Measured, machine: Machine, more_ranks: Sequence[int] = MORE_RANKS
) -> Remedy | None:
    """Find the cheapest combination that fits this number of ranks, or else a multiple of it. Returns None if none
    fits. `measured` has the peaks of the unchanged recipe."""
    present = subject.recipe.learner.gradient_checkpointing
    by_checkpointing: dict[Checkpointing, Measured] = {present: measured}
    for kind in RECOMPUTING[RECOMPUTING.index(present) + 1 :]:
        by_checkpointing[kind] = measure(changed(subject, {CHECKPOINTING: kind}))
    for factor in more_ranks:
        more = replace(machine, ranks=machine.ranks * factor)
        for remedy in sorted(_candidates(subject, more, by_checkpointing), key=lambda remedy: remedy.cost):
            recipe = changed(subject, remedy.changes).recipe
            if not rule_problems(recipe) and not deepspeed_problems(recipe):
                return remedy
    return None


def _candidates(subject: Subject, machine: Machine, measured: Mapping[Checkpointing, Measured]) -> Iterator[Remedy]:
    """Yield all combinations that fit the machine, each with the recipe's microbatches or the largest that fit."""
    references: list[Changes] = [{}, {REFERENCE: "cpu"}] if keeps_start(subject.recipe) else [{}]
    usable = [engine for engine in engines(subject.recipe, machine) if _can_work(changed(subject, engine), machine)]
    strategies = _strategies(subject.recipe, machine)
    for kind, strategy, engine, reference in product(measured, strategies, usable, references):
        wanted = {CHECKPOINTING: kind, **strategy, **engine, **reference}
        each = changed(subject, wanted)
        name = each.recipe.train.strategy
        name = "single" if name == "auto" else name
        judged = option(each, measured[kind], machine, name)
        if not judged.fits and 0 < judged.largest_tokens < judged.tokens:
            wanted[TOKENS] = max(each.smallest_tokens, judged.largest_tokens * MARGIN // 16)
            judged = option(changed(subject, wanted), measured[kind], machine, name)
        if judged.fits:
            changes = {key: value for key, value in wanted.items() if value != attrgetter(key)(subject.recipe)}
            yield Remedy(changes=changes, machine=machine, option=judged)


def _strategies(recipe: Recipe, machine: Machine) -> Iterator[Changes]:
    """Yield the strategies that the number of ranks allows, and DeepSpeed's ways of offloading."""
    if machine.ranks == 1:
        yield {}
    else:
        whole_adapters = (kind for kind in STRATEGY_KINDS.values() if not kind.is_alone and not kind.divides_adapters)
        yield from ({STRATEGY: kind.name} for kind in whole_adapters)
    zero = recipe.train.deepspeed
    yield {STRATEGY: "deepspeed", STAGE: zero.stage}
    for weights, optimizer in ((False, True), (True, False), (True, True)):
        stage = 3 if weights else zero.stage
        yield {STRATEGY: "deepspeed", STAGE: stage, OFFLOAD_WEIGHTS: weights, OFFLOAD_OPTIMIZER: optimizer}


def engines(recipe: Recipe, machine: Machine) -> Iterator[Changes]:
    """Yield the recipe's own engine, and vLLM over several ranks of a machine with several shares of their memory."""
    yield {}
    if not isinstance(recipe, GrpoRecipe) or machine.device is None or recipe.rollout.engine_kind.is_served:
        return
    for ranks, share, level in product(ENGINE_RANKS, ENGINE_SHARES, (0, 1)):
        if machine.ranks % ranks == 0 and ranks <= machine.device.per_machine:
            yield {ENGINE: "vllm", TENSOR_PARALLEL: ranks, SHARE: share, SLEEP: level}


def _can_work(subject: Subject, machine: Machine) -> bool:
    return engine_obstacle(subject.recipe, subject.sizes, subject.rollout(machine), machine.ranks) is None


def changed(subject: Subject, changes: Changes) -> Subject:
    """Return the subject with other values in its recipe, none of which changes its sizes."""
    return replace(subject, recipe=subject.recipe.with_values(changes))
