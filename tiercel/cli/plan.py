"""`tiercel plan`: estimate the memory and time of a recipe on GPUs that need not be present."""

import json
from argparse import Namespace
from collections.abc import Mapping
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from tiercel.cli.values import size
from tiercel.config import Recipe
from tiercel.doctor.machine import allowed_memory
from tiercel.errors import EnvironmentProblem, RecipeError
from tiercel.log import printed
from tiercel.message_text import counted
from tiercel.planning.devices import DEVICES, Device, Machine
from tiercel.planning.fit import find_fit, output_file
from tiercel.planning.memory import RankMemory
from tiercel.planning.options import Option
from tiercel.planning.plan import MemoryPlan, make_plan
from tiercel.planning.remedies import written
from tiercel.writing import writing

ASSUMED_DEVICE, ASSUMED_MEMORY = "h100", size("80GB")
SHOWN_UNIT = 10**8  # bytes; tables show tenths of a gigabyte


def run(recipe: Recipe, arguments: Namespace) -> None:
    """Print the plan. If nothing fits, raises EnvironmentProblem with the nearest change that would."""
    if arguments.gpus % recipe.train.context_parallel:
        raise RecipeError(
            [
                f"train.context_parallel: is {recipe.train.context_parallel}, but must divide the number of GPUs "
                f"({arguments.gpus}); name a multiple of it with --gpus"
            ],
            arguments.recipe,
        )
    device = DEVICES[arguments.device or ASSUMED_DEVICE]
    memory = arguments.fit or arguments.gpu_memory or ASSUMED_MEMORY
    machine = Machine(
        ranks=arguments.gpus,
        memory_bytes=memory.byte_count,
        device=device,
        host_bytes=arguments.host_memory.byte_count if arguments.host_memory else host_memory(arguments.gpus, device),
    )
    if arguments.fit:
        write_fit(recipe, machine, arguments)
        return
    plan = make_plan(recipe, machine, arguments.prompt_tokens)
    if arguments.json:
        print(json.dumps(plan.as_json(), indent=1))
    else:
        if memory.is_assumed:
            print(f"--gpu-memory: no unit given, so {memory.text}")
        if arguments.device is None or arguments.gpu_memory is None:
            print(
                f"planned for {arguments.gpus} x {device.name} with {memory.text}, whatever this machine has; "
                f"name your own GPUs with --gpus, --gpu-memory SIZE and --device ({', '.join(DEVICES)})"
            )
        show(plan, str(arguments.recipe))
    if plan.chosen is None:
        advice = f"this fits: {plan.change}" if plan.change else "none of the changes that tiercel knows makes it fit"
        asked = f"{arguments.gpus} x {memory.text}"
        raise EnvironmentProblem(f"{arguments.recipe} does not fit into {asked} of GPU memory; {advice}")


def write_fit(recipe: Recipe, machine: Machine, arguments: Namespace) -> None:
    """Write the nearest recipe that fits. Raises EnvironmentProblem if none does, or if the file exists already."""
    file = arguments.output or output_file(arguments.recipe, arguments.fit.text)
    if file.exists():
        raise EnvironmentProblem(f"{file} already exists; remove it, or name another file with --output")
    with printed(partial(print, flush=True)):
        fit = find_fit(recipe, machine)
    if fit is None:
        remedy = (
            "add the section lora, or more GPUs with --gpus"
            if recipe.lora is None
            else "the smallest weights and the shortest lengths were tried; use a smaller checkpoint, or more GPUs "
            "with --gpus"
        )
        asked = f"{machine.ranks} x {arguments.fit.text}"
        raise EnvironmentProblem(f"{arguments.recipe} does not fit into {asked} of GPU memory; {remedy}")
    with writing(file), file.open("x", encoding="utf-8") as new:
        new.write(fit.text)
    for change in fit.changes:
        print(change.line)
    peak = fit.option.memory.peak / 1e9
    print(f"{file}: {peak:.1f} GB at most of {arguments.fit.text}, {counted(len(fit.changes), 'key')} changed")


def host_memory(gpus: int, device: Device) -> int | None:
    """Return the bytes of memory that a run gets on this machine if it has the GPUs of the plan, or None if the memory
    of the planned machine is unknown."""
    return allowed_memory() if torch.cuda.device_count() >= min(gpus, device.per_machine) else None


def _amount(count: int) -> str:
    """Format a number of weights in the largest unit in which it is at least 0.1."""
    if count >= 1e8:
        return f"{count / 1e9:.2f} billion"
    return f"{count / 1e6:.1f} million" if count >= 1e5 else f"{count:,}"


def show(plan: MemoryPlan, name: str) -> None:
    """Print the plan as tables."""
    console = Console(highlight=False, soft_wrap=True)
    sizes = plan.sizes
    used = f"{_amount(sizes.active_weights)} used by a token, " if sizes.expert_weights else ""
    console.print(
        f"{name}: {_amount(sizes.weights)} weights, {used}{_amount(sizes.trained)} of them trained; "
        f"microbatches of {plan.tokens:,} tokens, prompts of {plan.prompt_tokens:,}"
    )
    console.print(_options_table(plan))
    for obstacle in dict.fromkeys(option.memory.obstacle for option in plan.options if option.memory.obstacle):
        console.print(obstacle)
    if plan.remedy is not None:
        ranks = plan.remedy.machine.ranks
        more = f" on {ranks} GPUs" if ranks != plan.machine.ranks else ""
        console.print(f"what would fit{more}, to be written into the recipe:")
        for key, value in plan.remedy.changes.items():
            console.print(f"  {key}: {written(value)}", markup=False)
    console.print(_parts_table(plan.shown.memory))
    _show_host(plan, console)
    options = plan.options if plan.remedy is None else (*plan.options, plan.remedy.option)
    _show_seconds(plan, options, console)
    if plan.idle_ranks:
        busy = plan.machine.ranks - plan.idle_ranks
        console.print(
            f"idle: {plan.idle_ranks} of {plan.machine.ranks} ranks, because a step has {counted(busy, 'row')} to "
            "learn from; raise optim.prompts_per_step, or take fewer GPUs"
        )
    if sizes.vision_weights and not plan.measures_tower:
        console.print("the passes of this family's vision tower are not in the plan; leave memory for them")
    if plan.flex_problem:
        console.print(f"{plan.flex_problem}; a run takes learner.form: dense, for which this memory is not planned")
    if plan.chosen:
        console.print(f"train.strategy: {plan.chosen}, {plan.reason}")


def _options_table(plan: MemoryPlan) -> Table:
    """Return a table of the peak memory that each strategy needs."""
    fits = ("yes" if option.fits else "no" for option in plan.options)
    table = Table("GB on each rank", *(option.memory.strategy for option in plan.options))
    for phase in plan.options[0].memory.phases:
        table.add_row(f"most during {phase}", *(_gigabytes(option.memory.phases[phase]) for option in plan.options))
    table.add_row(f"fits into {_gigabytes(plan.machine.memory_bytes)}", *fits)
    table.add_row("largest microbatch", *(f"{option.largest_tokens:,}" for option in plan.options))
    table.add_row("microbatch by auto", *(f"{option.auto_tokens:,}" for option in plan.options))
    return table


def _parts_table(memory: RankMemory) -> Table:
    """Return a table of what one strategy holds in each phase, by purpose. The columns add up."""
    table = Table(f"GB on each rank, {memory.strategy}", *memory.parts)
    columns = [in_tenths(parts) for parts in memory.parts.values()]
    for component in memory.components:
        values = [column.get(component, 0) for column in columns]
        if any(values):
            table.add_row(component, *(f"{value / 10:.1f}" for value in values))
    table.add_section()
    table.add_row("all", *(f"{sum(column.values()) / 10:.1f}" for column in columns))
    return table


def in_tenths(parts: Mapping[str, int]) -> dict[str, int]:
    """Round bytes to tenths of a gigabyte so that the parts add up to the rounded sum. The last part, fragmentation,
    takes the difference."""
    tenths = {name: round(size / SHOWN_UNIT) for name, size in parts.items()}
    tenths[list(parts)[-1]] += round(sum(parts.values()) / SHOWN_UNIT) - sum(tenths.values())
    return tenths


def _show_host(plan: MemoryPlan, console: Console) -> None:
    """Print what is kept in the host's memory, if anything is."""
    memory = plan.shown.memory
    if not memory.host:
        return
    machine = plan.machine if plan.remedy is None else plan.remedy.machine
    parts = ", ".join(f"{name} {_gigabytes(size)}" for name, size in memory.host.items())
    needed = memory.host_bytes * machine.ranks_together
    has = "not known here; --host-memory tells it"
    if machine.host_bytes is not None:
        has = f"{_gigabytes(machine.host_bytes)} GB"
    console.print(
        f"host memory: {_gigabytes(memory.host_bytes)} GB for each rank ({parts}), {_gigabytes(needed)} GB for the "
        f"{machine.ranks_together} of a machine, which has: {has}"
    )


def _show_seconds(plan: MemoryPlan, options: tuple[Option, ...], console: Console) -> None:
    device = plan.machine.device
    if device is None:
        return
    names = [option.memory.strategy for option in plan.options]
    table = Table("seconds of a step", *names, *(["with the changes"] if plan.remedy else []))
    for phase in dict.fromkeys(phase for option in options for phase in option.seconds):
        table.add_row(phase, *(f"{option.seconds.get(phase, 0.0):.1f}" for option in options))
    console.print(table)
    console.print(
        f"seconds assume {device.name}: {device.reached_flops:.0%} of {device.flops / 1e12:.0f} TFLOP/s, "
        f"{device.reached_bandwidth:.0%} of {device.bandwidth / 1e12:.2f} TB/s; images and rewards are not in them"
    )


def _gigabytes(value: int) -> str:
    return f"{value / 1e9:.1f}"
