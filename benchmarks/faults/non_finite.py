"""NaN and infinity in advantage, loss, gradient and weights, on one rank only: all ranks stop at the same step, nothing
is changed, and the row is named."""

import json
import re
import time
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.faults.figure import Figure, Outcome, Size, figure_of
from benchmarks.faults.processes import Ended, TinyRuns, run, steps_recorded
from tiercel.errors import EXIT_TRAINING

STEP = 2
SITES = ("advantage", "loss", "gradient", "weights")
KINDS = ("nan", "inf")
PLACES = (f"checkpoints/step-{STEP:06d}", f"nonfinite/step-{STEP + 1:06d}")
ADAPTER = "adapter/adapter_model.safetensors"


def non_finite(size: Size, seed: int, work: Path) -> Figure:
    started = time.perf_counter()
    runs = TinyRuns(work)
    outcomes: list[Outcome] = []
    cases = list(product(SITES, KINDS, (1, 2)))
    if size == "short":
        cases = [("gradient", KINDS[seed % 2], 2)]
    for site, kind, world_size in cases:
        name = f"{site}-{kind}-{world_size}"
        recipe = runs.recipe("grpo", name, train={"steps": 4, "save_every": 1, "threads": 1})
        launcher = ("--nproc", str(world_size), "train.strategy=ddp") if world_size > 1 else ()
        plan = json.dumps([{"step": STEP, "site": site, "rank": world_size - 1, "kind": kind}])
        ended = run("grpo", recipe, *launcher, plan=plan)
        outcomes.append((name, _problem(ended, site, world_size, work / name)))
    return figure_of("NaN or Inf on one rank", outcomes, seed=seed, seconds=time.perf_counter() - started)


def _problem(ended: Ended, site: str, world_size: int, run_directory: Path) -> str | None:
    if (problem := ended.problem(EXIT_TRAINING, "no parameter was changed")) is not None:
        return problem
    if not re.search(r"for rows row-\d+", ended.said):
        return f"names no row: {ended.said[-500:]}"
    if world_size > 1 and site != "weights" and f"(rank {world_size - 1})" not in ended.said:
        return f"names no rank: {ended.said[-500:]}"
    if (steps := steps_recorded(run_directory)) != list(range(1, STEP + 1)):
        return f"steps {steps} were recorded, not {STEP}"
    if site in ("advantage", "weights"):  # found before anything is stored; spoilt on purpose
        return None
    before, after = (load_file(run_directory / place / ADAPTER) for place in PLACES)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    return f"{changed[0]} was changed" if changed else None
