"""Which strategy a run takes, and why."""

import os
from collections.abc import Callable

import torch

from tiercel.config.schema import BaseRecipe, GrpoRecipe, SftRecipe
from tiercel.config.strategies import StrategyKind
from tiercel.distributed.ranks import Ranks
from tiercel.errors import EnvironmentProblem
from tiercel.planning.devices import DEVICES
from tiercel.planning.machine import Machine, memory_here
from tiercel.planning.plan import Plan, gathering_problem, make_plan


def chosen_strategy(recipe: BaseRecipe, ranks: Ranks, device: torch.device, say: Callable[[str], None]) -> str:
    """Choose the strategy to run; `auto` takes the plan's. Raises EnvironmentProblem where the recipe's does not
    go with the ranks, or where the plan finds none that fits."""
    asked, kind = recipe.train.strategy, recipe.train.strategy_kind
    if kind is not None and kind.is_alone and ranks.world_size > 1:
        raise EnvironmentProblem(
            f"train.strategy: single with {ranks.world_size} ranks; write auto, ddp, fsdp2 or deepspeed, or start one"
        )
    if kind is not None:
        ranks.on_first(lambda: _require_gatherable(recipe, kind, ranks, device))
        return asked
    if ranks.world_size == 1:
        return "single"
    if device.type == "cpu":
        say("train.strategy: ddp; ranks on CPUs share their machine's memory, so no plan was made")
        return "ddp"
    name, reason = ranks.on_first(lambda: _planned(recipe, ranks, device))
    say(f"train.strategy: {name}, {reason}")
    return name


def _require_gatherable(recipe: BaseRecipe, strategy: StrategyKind, ranks: Ranks, device: torch.device) -> None:
    """Raise EnvironmentProblem, before weights are read, where a sharded policy cannot be gathered to sample from."""
    shares = strategy.shards_model and recipe.train.deepspeed.stage == 3
    if not shares or not isinstance(recipe, GrpoRecipe) or not recipe.rollout.engine_kind.shares_weights:
        return
    kind = DEVICES["h100"] if device.type == "cuda" else None
    machine = Machine(ranks=ranks.world_size, memory_bytes=rank_memory_bytes(device), device=kind)
    if problem := gathering_problem(recipe, machine, strategy.name):
        raise EnvironmentProblem(problem)


def rank_memory_bytes(device: torch.device) -> int:
    """Return the memory of this rank's GPU; on CPUs an equal share of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return memory_here() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _planned(recipe: BaseRecipe, ranks: Ranks, device: torch.device) -> tuple[str, str]:
    assert isinstance(recipe, SftRecipe | GrpoRecipe)
    memory = rank_memory_bytes(device)
    machine = Machine(ranks=ranks.world_size, memory_bytes=memory, device=DEVICES["h100"], host_bytes=memory_here())
    plan: Plan = make_plan(recipe, machine)
    if plan.chosen is None:
        change = f"; this fits: {plan.change}" if plan.change else ""
        raise EnvironmentProblem(
            f"train.strategy: auto, but the plan finds no strategy that fits into {memory / 1e9:.0f} GB on "
            f"{ranks.world_size} ranks{change}; name a strategy to try it all the same"
        )
    return plan.chosen, plan.reason
