"""SIGKILL while the turns of trajectories are sampled and answered: the run resumes and ends with the same bytes as an
uninterrupted run, and no process of an environment outlives it."""

import os
import random
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.faults.figure import Figure, Size, figure_of
from benchmarks.faults.kills import LONGEST_RUN_SECONDS, STEPS, Victim, kill_again_and_again, until, victim_of
from benchmarks.faults.processes import FAMILY, SECONDS_TO_BE_GONE
from tests.calling_models import save_calling_checkpoint
from tests.tiny_models import save_tiny_checkpoint
from tests.training.turn_recipes import CALLS, SCENE, turn_recipe
from tiercel.config import recipe_to_yaml

KILLS = {"short": 2, "full": 20}
CALL_SECONDS = 0.03  # many kills fall into a call
LOG = """\
        import os, time
        with open(__file__ + ".calls", "a") as log:
            print(os.getpid(), file=log)
        time.sleep({seconds})
        if part > 8:
"""


@dataclass(kw_only=True, slots=True)
class Watched:
    """The calls of an environment's tool, each with the process that answered it."""

    log: Path
    most: int = 0  # between the start of a run and its kill
    left: list[str] = field(default_factory=list)  # processes that outlived a kill

    def processes(self) -> list[str]:
        """Return the process of each call, of all runs so far."""
        return self.log.read_text().split() if self.log.exists() else []

    def inside_a_rollout(self, victim: Victim, process: int, draw: random.Random) -> bool:
        """Wait for a random number of calls, and a part of a call. Returns False if the run ended before."""
        self.require_gone()
        wanted = len(self.processes()) + draw.randint(1, self.most)
        if until(lambda: len(self.processes()) >= wanted, process, LONGEST_RUN_SECONDS, pause=0.001):
            return False
        return not until(lambda: False, process, CALL_SECONDS * draw.random(), pause=0.001)

    def require_gone(self) -> None:
        """Note the processes of earlier runs that are still alive."""
        deadline = time.monotonic() + SECONDS_TO_BE_GONE
        while (alive := {each for each in self.processes() if os.path.exists(f"/proc/{each}")}) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.01)
        self.left += sorted(alive)


def turn_kills(size: Size, seed: int, work: Path) -> Figure:
    started = time.perf_counter()
    checkpoint = save_calling_checkpoint(save_tiny_checkpoint(FAMILY, work / "tiny"), work / "model", CALLS)
    victim = victim_of("grpo", partial(_recipe, checkpoint, work))
    watched = Watched(log=work / "scene.py.calls")
    calls = len(watched.processes())
    watched.most = calls // 2
    kill_again_and_again(victim, KILLS[size], random.Random(seed), [watched.inside_a_rollout])
    watched.require_gone()
    left = [(f"process {each}", "outlived its run") for each in watched.left]
    return figure_of(
        "SIGKILL between turns",
        victim.kills + left,
        seed=seed,
        seconds=time.perf_counter() - started,
        figures={"tool_calls_of_a_run": calls, "most_steps_lost": victim.most_steps_lost},
    )


def _recipe(checkpoint: Path, work: Path, name: str) -> Path:
    recipe = turn_recipe(checkpoint, work, name, train={"steps": STEPS, "save_every": 2})
    (work / "scene.py").write_text(
        "import os\nimport time\n"
        + SCENE.replace("        if part > 8:\n", LOG.format(seconds=CALL_SECONDS).lstrip("\n"))
    )
    file = work / f"{name}.yaml"
    file.write_text(recipe_to_yaml(recipe))
    return file
