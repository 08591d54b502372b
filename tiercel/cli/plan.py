"""`tiercel plan`: memory and time of a recipe on GPUs that need not be there."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tiercel.config import detect_kind, load_recipe
from tiercel.errors import EnvironmentProblem
from tiercel.planning.plan import Machine, Option, Plan, make_plan
from tiercel.planning.seconds import DEVICES

UNITS = {"": 1, "B": 1, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def plan_recipe(
    recipe_file: Path,
    overrides: Sequence[str],
    *,
    gpus: int,
    gpu_memory: str,
    device: str,
    prompt_tokens: int | None,
    as_json: bool,
) -> None:
    """Print the plan. Raises EnvironmentProblem, with the nearest change, where nothing fits."""
    kind = detect_kind(recipe_file, overrides)
    recipe = load_recipe(kind, recipe_file, overrides, check_paths=False)
    machine = Machine(ranks=gpus, memory_bytes=read_bytes(gpu_memory), device=DEVICES[device])
    plan = make_plan(recipe, machine, prompt_tokens)
    if as_json:
        print(json.dumps(plan.as_json(), indent=1))
    else:
        show(plan, str(recipe_file))
    if plan.chosen is None:
        advice = f"; this fits: {plan.change}" if plan.change else ", and no change that tiercel knows makes it fit"
        raise EnvironmentProblem(f"{recipe_file} does not fit into {gpus} GPUs of {gpu_memory}{advice}")


def read_bytes(text: str) -> int:
    """80GB, 80GiB, 81559MiB or plain bytes."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in UNITS:
        raise EnvironmentProblem(f"--gpu-memory: {text} given; write a size such as 80GB or 24GiB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def show(plan: Plan, name: str) -> None:
    """The plan as tables."""
    console = Console(highlight=False, soft_wrap=True)
    sizes = plan.sizes
    console.print(
        f"{name}: {sizes.weights / 1e9:.2f} billion weights, {sizes.trained / 1e6:.1f} million of them trained; "
        f"microbatches of {plan.tokens:,} tokens, prompts of {plan.prompt_tokens:,}"
    )
    table = Table("GB on each rank", *(option.memory.strategy for option in plan.options))
    for component in dict.fromkeys(name for option in plan.options for name in option.memory.components):
        values = [option.memory.components.get(component, 0) for option in plan.options]
        if any(values):
            table.add_row(component, *map(_gigabytes, values))
    table.add_section()
    for phase in plan.options[0].memory.phases:
        table.add_row(f"most during {phase}", *(_gigabytes(option.memory.phases[phase]) for option in plan.options))
    table.add_row(f"fits into {_gigabytes(plan.machine.memory_bytes)}", *map(_verdict, plan.options))
    table.add_row("largest microbatch", *(f"{option.largest_tokens:,}" for option in plan.options))
    console.print(table)
    for obstacle in dict.fromkeys(option.memory.obstacle for option in plan.options if option.memory.obstacle):
        console.print(obstacle)
    if plan.options[0].seconds and plan.machine.device is not None:
        device = plan.machine.device
        times = Table("seconds of a step", *(option.memory.strategy for option in plan.options))
        for phase in dict.fromkeys(phase for option in plan.options for phase in option.seconds):
            times.add_row(phase, *(f"{option.seconds.get(phase, 0.0):.1f}" for option in plan.options))
        console.print(times)
        console.print(
            f"seconds assume {device.name}: {device.reached_flops:.0%} of {device.flops / 1e12:.0f} TFLOP/s, "
            f"{device.reached_bandwidth:.0%} of {device.bandwidth / 1e12:.2f} TB/s; images and rewards are not in them"
        )
    if plan.chosen:
        console.print(f"train.strategy: {plan.chosen}, {plan.reason}")


def _gigabytes(value: int) -> str:
    return f"{value / 1e9:.1f}"


def _verdict(option: Option) -> str:
    return "yes" if option.fits else "no"
