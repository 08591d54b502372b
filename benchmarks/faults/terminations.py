"""SIGTERM in each phase: the run saves at the next boundary and ends with 75, nothing is left, and it can resume."""

import json
import time
from pathlib import Path

from benchmarks.faults.figure import Figure, Outcome, Size, figure_of
from benchmarks.faults.processes import TinyRuns, run, steps_recorded
from tiercel.errors import EXIT_DONE, EXIT_TERMINATED
from tiercel.runs.checkpoints import newest_valid

GRACE_SECONDS = 30.0
STEPS = 6
PHASES = {
    "grpo": ("data", "rollout", "reward", "learn", "sync", "save"),
    "sft": ("data", "learn", "save"),
}
SHORT = (("grpo", "reward"),)


def terminations(size: Size, seed: int, work: Path) -> Figure:
    started = time.perf_counter()
    runs = TinyRuns(work)
    outcomes: list[Outcome] = []
    slowest = 0.0
    for kind, phases in PHASES.items():
        for phase in phases:
            ranks = (1, 2) if size == "full" and kind == "grpo" else (1,)
            if size == "short" and (kind, phase) not in SHORT:
                continue
            for world_size in ranks:
                name = f"{kind}-{phase}-{world_size}"
                seconds, problem = _terminated(runs, kind, phase, world_size, name, goes_on=size == "full")
                outcomes.append((name, problem))
                slowest = max(slowest, seconds)
    return figure_of(
        "SIGTERM in each phase",
        outcomes,
        seed=seed,
        seconds=time.perf_counter() - started,
        figures={"grace_seconds": GRACE_SECONDS, "slowest_end_seconds": slowest},
    )


def _terminated(
    runs: TinyRuns, kind: str, phase: str, world_size: int, name: str, *, goes_on: bool
) -> tuple[float, str | None]:
    """Return the seconds from the signal to the end, and what is wrong."""
    recipe = runs.recipe(kind, name, train={"steps": STEPS, "save_every": 2, "threads": 1})
    launcher = ("--nproc", str(world_size), "train.strategy=ddp") if world_size > 1 else ()
    plan = json.dumps([{"step": 2, "site": phase, "rank": 0, "kind": "term"}])
    ended = run(kind, recipe, *launcher, plan=plan)
    seconds = ended.seconds_from_fault or 0.0
    problem = ended.problem(EXIT_TERMINATED, "run the same command again to resume", within=GRACE_SECONDS)
    if problem is not None:
        return seconds, problem
    found = newest_valid(runs.work / name / "checkpoints", lambda text: None)
    last = max(steps_recorded(runs.work / name))
    if found is None or found.step != last:
        return seconds, f"{last} steps were made, and the newest checkpoint is {found and found.step}"
    if goes_on:
        again = run(kind, recipe, *launcher)
        problem = again.problem(EXIT_DONE, f"going on from step {last}")
        if problem is None and steps_recorded(runs.work / name) != list(range(1, STEPS + 1)):
            problem = f"metrics have the steps {steps_recorded(runs.work / name)}"
    return seconds, problem
