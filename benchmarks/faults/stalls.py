"""A rank that sleeps, is stopped, dies, or skips a collective: this is reported in time, with the rank at fault
named."""

import json
import time
from pathlib import Path

from benchmarks.faults.figure import Figure, Outcome, Size, figure_of
from benchmarks.faults.processes import TinyRuns, run
from tiercel.errors import EXIT_STALL, EXIT_TRAINING

TIMEOUT = 3.0  # reliability.stall_timeout
LIMITS = {"reward": 2.0, "save": 3.0}  # of these phases, in timeouts: the reward's own on top; no sign of progress
SECONDS_TO_SAY = 5.0
SECONDS_TO_END = 35.0  # torch's launcher gives a stopped rank half a minute before it kills it
STEP = 2  # its second update; the checkpoint after it makes "save" its last phase
AMID_STEP = 3  # its first collective is not a save's

# kind, site, exit code, what the message says
CASES = (
    ("sleep", "rollout", EXIT_STALL, "is in phase rollout of step 2, rows row-"),
    ("sleep", "learn", EXIT_STALL, "is in phase learn of step 2, rows row-"),
    ("sleep", "reward", EXIT_STALL, "is in phase reward of step 2, rows row-"),
    ("sleep", "sync", EXIT_STALL, "is in phase sync of step 2"),
    ("sleep", "save", EXIT_STALL, "is in phase save of step 2"),
    ("stop", "learn", EXIT_STALL, "gives no sign of life"),
    ("kill", "learn", EXIT_TRAINING, "was killed by SIGKILL"),
    ("exit", "rollout", EXIT_TRAINING, "ended with exit code 1"),
    ("skip", "collective", EXIT_STALL, "collective"),
    ("skip", "gradients", EXIT_STALL, "is in a different collective from the others"),
)
SHORT = (("sleep", "learn"),)


def stalls(size: Size, seed: int, work: Path) -> Figure:
    started = time.perf_counter()
    runs = TinyRuns(work)
    outcomes: list[Outcome] = []
    slowest = 0.0
    cases = [case for case in CASES if size == "full" or case[:2] in SHORT]
    for number, (kind, site, code, text) in enumerate(cases):
        for rank in (0, 1) if size == "full" else ((number + seed) % 2,):
            name = f"{kind}-{site}-{rank}"
            recipe = runs.recipe("grpo", name, reliability={"stall_timeout": TIMEOUT, "reward_timeout": TIMEOUT})
            step = AMID_STEP if site == "collective" else STEP
            plan = json.dumps([{"step": step, "site": site, "rank": rank, "kind": kind}])
            ended = run("grpo", recipe, "--nproc", "2", "train.strategy=ddp", plan=plan)
            limit = TIMEOUT * LIMITS.get(site, 1.0) + SECONDS_TO_SAY
            within = limit + SECONDS_TO_END if kind == "stop" else limit
            problem = ended.problem(code, text, f"rank {rank}", within=within)
            if code == EXIT_STALL and problem is None:
                problem = _culprit_problem(work / name, ended.said, rank)
            outcomes.append((name, problem))
            if kind != "stop":
                slowest = max(slowest, ended.seconds_from_fault or 0.0)
    figures = {"stall_timeout_seconds": TIMEOUT, "slowest_end_seconds": slowest}
    seconds = time.perf_counter() - started
    return figure_of("a rank sleeps, stops, dies, skips", outcomes, seed=seed, seconds=seconds, figures=figures)


def _culprit_problem(run_directory: Path, said: str, rank: int) -> str | None:
    """Return what is wrong: the message's first line about a rank must be about the one at fault, and the stacks must
    exist."""
    if "the ranks are at different places" in said:  # they met again, in another collective
        return None if f"rank {rank} skipped a collective" in said else f"names another rank: {said[-500:]}"
    if not any(line.strip().startswith(f"rank {rank} ") for line in said.splitlines()):
        return f"does not begin with rank {rank}: {said[-500:]}"
    return None if list((run_directory / "stall").glob("step-*/rank-*.txt")) else "no stacks were written"
