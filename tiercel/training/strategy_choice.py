"""Which strategy a run uses, how many tokens its microbatches have, and why."""

import json
import os
from dataclasses import dataclass

import torch

from tiercel.config.schema import BaseRecipe, GrpoRecipe, Recipe
from tiercel.config.strategies import StrategyKind
from tiercel.distributed.ranks import Ranks
from tiercel.doctor.machine import allowed_memory, free_memory
from tiercel.errors import EnvironmentProblem, RunError
from tiercel.log import logger
from tiercel.planning.devices import DEVICES, Machine
from tiercel.planning.plan import MemoryPlan, gathering_problem, make_plan
from tiercel.regular_files import read_json
from tiercel.runs.directory import RunDirectory
from tiercel.runs.files import write_atomically
from tiercel.writing import GO_ON, writing

BUDGET = "learner.max_tokens_per_microbatch"
FILE = "chosen.json"  # of a run that the plan gave its number of tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyChoice:
    """How a run divides its work."""

    strategy: str
    tokens: int  # of a microbatch
    reasons: tuple[str, ...] = ()  # for the log


def chosen_strategy(recipe: BaseRecipe, ranks: Ranks, device: torch.device) -> StrategyChoice:
    """Choose the strategy and the microbatches to run. Anything set to `auto` comes from the plan; GPUs are planned for
    whether there is one or several. Raises EnvironmentProblem if the recipe's strategy does not go with the ranks, or
    if the plan finds nothing that fits."""
    strategy, kind, tokens = recipe.train.strategy, recipe.train.strategy_kind, recipe.learner.max_tokens_per_microbatch
    if kind is not None and kind.is_alone and ranks.world_size > 1:
        raise EnvironmentProblem(
            f"train.strategy: single does not work with {ranks.world_size} ranks; use auto, ddp, fsdp2 or deepspeed, "
            "or start one"
        )
    if kind is not None:
        ranks.run_on_first(lambda: _require_gatherable(recipe, kind, ranks, device))
    elif device.type == "cpu" and ranks.world_size > 1:
        logger.info("train.strategy: ddp; ranks on CPUs share their machine's memory, so no plan was made for it")
        strategy = "ddp"
    elif device.type == "cpu":
        strategy = "single"
    if strategy != "auto" and tokens != "auto":
        return StrategyChoice(strategy=strategy, tokens=tokens)
    asked = recipe.with_values({"train.strategy": strategy})
    choice = ranks.run_on_first(lambda: _planned(asked, ranks, device))
    for reason in choice.reasons:
        logger.info(reason)
    return choice


def _require_gatherable(recipe: BaseRecipe, strategy: StrategyKind, ranks: Ranks, device: torch.device) -> None:
    """Raise EnvironmentProblem, before weights are read, if a sharded policy cannot be gathered to sample from."""
    shares = strategy.shards_model and recipe.train.deepspeed.stage == 3
    if not shares or not isinstance(recipe, GrpoRecipe) or not recipe.rollout.engine_kind.shares_weights:
        return
    if problem := gathering_problem(recipe, _machine(ranks, device, rank_memory_bytes(device, ranks)), strategy.name):
        raise EnvironmentProblem(problem)


def rank_memory_bytes(device: torch.device, ranks: Ranks) -> int:
    """Return the memory of this rank's GPU or, on CPUs, an equal share of the machine's memory or of the
    container's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return allowed_memory() // ranks.local_size


def _planned(recipe: BaseRecipe, ranks: Ranks, device: torch.device) -> StrategyChoice:
    """Use the plan for what the recipe leaves to it. On CPUs the memory is an equal share of what is free."""
    assert isinstance(recipe, Recipe)
    memory = rank_memory_bytes(device, ranks) if device.type == "cuda" else free_memory() // ranks.local_size
    plan = make_plan(recipe, _machine(ranks, device, memory))
    if plan.chosen is None:
        raise EnvironmentProblem(_nothing_fits(recipe, plan))
    option, room = plan.shown, f"{memory / 1e9:.1f} GB"
    reasons = [f"plan: a rank holds up to {option.memory.peak / 1e9:.1f} of {room}, in microbatches of {plan.tokens:,}"]
    if recipe.train.strategy == "auto":
        reasons.append(f"train.strategy: {plan.chosen}, {plan.reason}")
    if recipe.learner.max_tokens_per_microbatch == "auto":
        reasons.append(f"{BUDGET}: auto takes {plan.tokens:,} tokens; up to {option.largest_tokens:,} fit into {room}")
    return StrategyChoice(strategy=plan.chosen, tokens=plan.tokens, reasons=tuple(reasons))


def _nothing_fits(recipe: Recipe, plan: MemoryPlan) -> str:
    """Say what does not fit, and what would."""
    room = f"{plan.machine.memory_bytes / 1e9:.0f} GB on {plan.machine.ranks} ranks"
    change = f"; this fits: {plan.change}" if plan.change else ""
    if recipe.learner.max_tokens_per_microbatch == "auto":
        least = min(option.memory.peak for option in plan.options) / 1e9
        return (
            f"{BUDGET}: auto, but by the plan not even one prompt with one completion ({plan.tokens:,} tokens, "
            f"{least:.1f} GB) fits into {room}{change}; if you name train.strategy, a number is tried without a plan"
        )
    if auto := max(option.auto_tokens for option in plan.options):
        change += f"; {BUDGET}: {auto} fits"
    return (
        f"train.strategy: auto, but the plan finds no strategy that fits into {room} in microbatches of "
        f"{plan.tokens:,} tokens{change}; name a strategy to try it all the same"
    )


def _machine(ranks: Ranks, device: torch.device, memory: int) -> Machine:
    if device.type == "cpu":
        return Machine(ranks=ranks.world_size, memory_bytes=memory, device=None)
    return Machine(ranks=ranks.world_size, memory_bytes=memory, device=DEVICES["h100"], host_bytes=allowed_memory())


def read_token_budget(recipe: BaseRecipe, run: RunDirectory) -> int | None:
    """Read the number of tokens that this run used before; None in a new run, or if the recipe has a number. Raises
    RunError for a file that is not as it was written."""
    file = run.path / FILE

    def read() -> int | None:
        if recipe.learner.max_tokens_per_microbatch != "auto" or not os.path.lexists(file):
            return None
        try:
            return int(read_json(file)[BUDGET])
        except (OSError, ValueError, LookupError, TypeError, OverflowError) as error:
            raise RunError(f"{file} does not say {BUDGET}: {error}; write the number from log.txt there") from error

    return run.ranks.run_on_first(read)


def write_token_budget(recipe: BaseRecipe, run: RunDirectory, tokens: int) -> None:
    """Write the number of tokens that a run uses, if the recipe does not have it."""
    if recipe.learner.max_tokens_per_microbatch != "auto":
        return
    file = run.path / FILE

    def write() -> None:
        with writing(file, GO_ON):
            write_atomically(file, json.dumps({BUDGET: tokens}))

    run.ranks.run_on_first(write)
