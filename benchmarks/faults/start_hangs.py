"""A rank that hangs or is stopped at a moment of its start, from Python's own start to the first update: it is named in
time."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.figure import Figure, Outcome, Size, figure_of
from benchmarks.faults.processes import Ended, TinyRuns, run
from tiercel.errors import EXIT_STALL

TIMEOUTS: dict[Size, float] = {"full": 8.0, "short": 4.0}  # reliability.stall_timeout
SECONDS_TO_SAY = 5.0
SECONDS_TO_END = 20.0
HANGING = Path(__file__).with_name("hanging")


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A moment of the start. `at` is in the form that `hanging/sitecustomize.py` reads, and `phase` is what the message
    must say about a rank that hangs."""

    name: str
    at: str
    phase: str


MOMENTS = (
    Moment(name="python's own start", at="python", phase="launch of the start"),
    Moment(name="reading the recipe", at="pydantic", phase="launch of the start"),
    Moment(name="importing torch", at="torch", phase="import of the start"),
    Moment(name="importing transformers", at="transformers", phase="import of the start"),
    Moment(name="before joining", at="tiercel.distributed.ranks:joined_ranks", phase="import of the start"),
    Moment(name="joining", at="torch.distributed:init_process_group", phase="join of the start"),
    Moment(name="first collective", at="torch.distributed:all_gather_object", phase="agree of the start"),
    Moment(name="comparing files", at="tiercel.distributed.agreement:facts", phase="agree of the start"),
    Moment(name="reading rows", at="tiercel.data.reading:read_run_rows", phase="rows of the start"),
    Moment(name="loading the model", at="tiercel.models.policy:build_policy", phase="load of step 0"),
    Moment(name="first gradients", at="torch.distributed:all_reduce", phase="learn of step 0"),
)
KINDS = ("sleep", "SIGSTOP")
SHORT = (("importing torch", "SIGSTOP", 1),)


def start_hangs(size: Size, seed: int, work: Path) -> Figure:
    started, timeout = time.perf_counter(), TIMEOUTS[size]
    runs = TinyRuns(work)
    outcomes: list[Outcome] = []
    slowest_word, slowest_end = 0.0, 0.0
    for moment in MOMENTS:
        for kind in KINDS:
            for rank in (0, 1):
                if size == "short" and (moment.name, kind, rank) not in SHORT:
                    continue
                ended = hang(runs, moment, kind, rank, timeout)
                slowest_word = max(slowest_word, ended.seconds_to_stalled or 0.0)
                slowest_end = max(slowest_end, ended.seconds_from_fault or 0.0)
                outcomes.append((f"{moment.name}, {kind}, rank {rank}", problem(ended, moment, kind, rank, timeout)))
    return figure_of(
        "a rank hangs at its start",
        outcomes,
        seed=seed,
        seconds=time.perf_counter() - started,
        figures={
            "stall_timeout_seconds": timeout,
            "slowest_word_seconds": slowest_word,
            "slowest_end_seconds": slowest_end,
        },
    )


def hang(runs: TinyRuns, moment: Moment, kind: str, rank: int, timeout: float) -> Ended:
    """Run two ranks, one of which hangs at the moment."""
    name = f"{moment.name} {kind} {rank}".replace(" ", "-").replace("'", "")
    recipe = runs.recipe("grpo", name, reliability={"stall_timeout": timeout, "reward_timeout": timeout})
    path = os.pathsep.join([str(HANGING), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"PYTHONPATH": path, "HANG_AT": moment.at, "HANG_KIND": kind, "HANG_RANK": str(rank)}
    return run("grpo", recipe, "--nproc", "2", "train.strategy=ddp", variables=variables)


def problem(ended: Ended, moment: Moment, kind: str, rank: int, timeout: float) -> str | None:
    """Return what is wrong, or None: it is named late, or another rank or place is named, or the run ends late. The
    last signal of a rank that is stopped may be from the previous phase."""
    text = f"phase {moment.phase}" if kind == "sleep" else "a signal has stopped it"
    if (wrong := ended.problem(EXIT_STALL, text, within=timeout + SECONDS_TO_END)) is not None:
        return wrong
    if ended.seconds_to_stalled is None or ended.seconds_to_stalled > timeout + SECONDS_TO_SAY:
        return f"named after {ended.seconds_to_stalled} s"
    named = [line.split()[1] for line in ended.said.splitlines() if line.startswith("  rank ")]
    return None if named and named[0] == str(rank) else f"names rank {named}: {ended.said[-500:]}"
