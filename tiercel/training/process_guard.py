"""The guard against stalls of a command that trains or evaluates, from before its heavy imports to its end. Imports no
torch."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tiercel.config.schema import BaseRecipe, GrpoRecipe
from tiercel.distributed.rank_status_files import note_code, statuses_directory
from tiercel.processes import launched_rank
from tiercel.reliability.heartbeat import Heartbeat
from tiercel.reliability.stall_files import NOWHERE, RankStatusFiles
from tiercel.reliability.watchdog import ANY_PHASE, Watchdog
from tiercel.reliability.work import process_age

BLIND = 3  # stall timeouts, for phases where only work shows progress: imports, reading and writing files, vLLM
BLIND_PHASES = ("import", "agree", "rows", "load", "engine", "save", "report")
DOWNLOAD_SECONDS = 86400.0  # it shows its own progress, and may take hours


@contextmanager
def process_guard(recipe: BaseRecipe, command: str, end: Callable[[int], None] | None = None) -> Iterator[Heartbeat]:
    """End this process with exit code 4 if it, or another rank, makes no progress. Yield the heartbeat by which the
    process shows its progress. `command` names the ranks that belong together, and `end` is called instead of ending
    the process."""

    def end_process(code: int) -> None:
        note_code(code)
        os._exit(code)

    rank = launched_rank()
    heartbeat = Heartbeat(rank or 0)
    files = RankStatusFiles(_directory(recipe, command), 1 if rank is None else int(os.environ["WORLD_SIZE"]))
    with Watchdog(
        heartbeat, Path(recipe.output), files, phase_limits(recipe), age=process_age(), end=end or end_process
    ):
        yield heartbeat


def _directory(recipe: BaseRecipe, command: str) -> Path:
    """Return the directory where ranks see each other's signs before anything is imported: the launcher's own under
    tiercel's launcher, otherwise the run directory, which all machines share."""
    if (directory := statuses_directory()) is not None:
        return directory
    return NOWHERE if launched_rank() is None else Path(recipe.output) / f".signs-{command}"


def phase_limits(recipe: BaseRecipe) -> dict[str, float]:
    """Return the seconds without progress that each phase may have: a stall's, plus what the phase itself may wait for
    others."""
    stall = recipe.reliability.stall_timeout
    limits = {ANY_PHASE: stall, **dict.fromkeys(BLIND_PHASES, BLIND * stall), "download": DOWNLOAD_SECONDS}
    if isinstance(recipe, GrpoRecipe):
        rewards = stall + recipe.reliability.reward_timeout * sum(reward.takes_time for reward in recipe.rewards)
        engine = recipe.rollout.engine_kind
        rollouts = stall if engine.shows_progress else BLIND * stall
        if engine.is_served:
            rollouts += recipe.rollout.patience + recipe.rollout.request_timeout
        limits |= {"reward": rewards, **dict.fromkeys(("rollout", "lookahead", "parity", "sync"), rollouts)}
        limits["engine"] += rollouts
        if recipe.taught_by is not None and recipe.taught_by.url is not None:
            limits["advantages"] = stall + recipe.rollout.patience + recipe.rollout.request_timeout
        limits["evaluation"] = max(rewards, rollouts)
    return limits
