"""SIGKILL at random moments, many of them inside a save: every run resumes, and ends with the same bytes as an
uninterrupted run.

The runs are forks of this process, which has imported everything, so that the moments fall into the run itself.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import tiercel.training.grpo.loop
import tiercel.training.offline.loop
import tiercel.training.run  # noqa: F401 - the forks have these at hand
from benchmarks.faults.child import take_own_locks
from benchmarks.faults.figure import Figure, Outcome, Size, figure_of
from benchmarks.faults.processes import TinyRuns, environment, steps_recorded
from tiercel.cli.main import main
from tiercel.config.keys import RECIPES
from tiercel.runs.checkpoints import newest_valid
from tiercel.runs.files import file_sha256

STEPS = 6
SAVE_EVERY = 2
KILLS = {"short": 2, "full": 40}  # for each kind of run; every second one inside a save
LONGEST_RUN_SECONDS = 120.0
VARYING = ("time/", "memory/")  # metrics that differ between any two runs
SAVE_SECONDS = 0.03  # approximate duration of a save, from which the moments inside it are drawn


@dataclass(slots=True)
class Victim:
    """A run that is killed again and again."""

    kind: str
    recipe: Path
    directory: Path
    expected: dict[str, str]  # sha256 by file, of an uninterrupted run
    kills: list[Outcome] = field(default_factory=list)
    inside_a_save: int = 0
    most_steps_lost: int = 0
    unproven: list[str] = field(default_factory=list)  # kills since the run last ended by itself

    def settle(self, problem: str | None) -> None:
        """Record what the run's end says about the previous kills."""
        self.kills += [(case, problem) for case in self.unproven]
        self.unproven.clear()


Moment = Callable[[Victim, int, random.Random], bool]  # waits in a run's process; False if the run ended before


def kills(size: Size, seed: int, work: Path) -> Figure:
    started = time.perf_counter()
    draw = random.Random(seed)
    runs = TinyRuns(work)
    changes = {"data": {"workers": 0}, "train": {"steps": STEPS, "save_every": SAVE_EVERY, "threads": 1}}
    victims = [victim_of(kind, partial(runs.recipe, kind, **changes)) for kind in RECIPES]
    for victim in victims:
        at_any_time = partial(_at_any_time, _seconds_of_a_run(victim))
        kill_again_and_again(victim, KILLS[size], draw, (at_any_time, _inside_a_save))
    outcomes = [outcome for victim in victims for outcome in victim.kills]
    return figure_of(
        "SIGKILL at random moments",
        outcomes,
        seed=seed,
        seconds=time.perf_counter() - started,
        figures={
            "inside_a_save": sum(victim.inside_a_save for victim in victims),
            "most_steps_lost": max(victim.most_steps_lost for victim in victims),
            "save_interval_steps": SAVE_EVERY,
        },
    )


def victim_of(kind: str, recipe_of: Callable[[str], Path]) -> Victim:
    """Return a run to kill, with the bytes of an uninterrupted one. `recipe_of` writes the recipe of a run by name."""
    whole = recipe_of(f"{kind}-whole")
    log = whole.with_suffix(".log")
    code = waited(forked(kind, whole, log), LONGEST_RUN_SECONDS)
    if code != 0:
        raise RuntimeError(f"the uninterrupted run ended with {code}: {log.read_text()[-800:]}")
    recipe, expected = recipe_of(f"{kind}-killed"), _bytes(whole.with_suffix(""))
    return Victim(kind=kind, recipe=recipe, directory=recipe.with_suffix(""), expected=expected)


def kill_again_and_again(victim: Victim, count: int, draw: random.Random, moments: Sequence[Moment]) -> None:
    """Kill the run at these kinds of moments in turn, and let it resume each time."""
    log = victim.directory.with_suffix(".log")
    done = 0
    while done < count:
        process = forked(victim.kind, victim.recipe, log)
        if not moments[done % len(moments)](victim, process, draw):
            _come_to_an_end(victim, process, log)
            continue
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        was_inside = bool(list((victim.directory / "checkpoints").glob(".step-*.tmp")))
        victim.inside_a_save += was_inside
        done += 1
        case = f"{victim.kind}, kill {done}" + (", inside a save" if was_inside else "")
        lost = _steps_lost(victim)
        victim.most_steps_lost = max(victim.most_steps_lost, lost)
        if lost > SAVE_EVERY:
            victim.kills.append((case, f"{lost} steps were lost"))
        else:
            victim.unproven.append(case)
    while victim.unproven:
        _come_to_an_end(victim, forked(victim.kind, victim.recipe, log), log)


def _come_to_an_end(victim: Victim, process: int, log: Path) -> None:
    """Wait for a run that is no longer killed, compare it, and clear its directory for the next."""
    code = waited(process, LONGEST_RUN_SECONDS)
    problem = None
    if code != 0:
        problem = f"the run that went on ended with {code}: {log.read_text()[-500:]}"
    elif (found := _bytes(victim.directory)) != victim.expected:
        changed = sorted(name for name in victim.expected | found if victim.expected.get(name) != found.get(name))
        problem = f"{changed[0]} has other bytes than in an uninterrupted run"
    elif (steps := steps_recorded(victim.directory)) != list(range(1, STEPS + 1)):
        problem = f"metrics have the steps {steps}"
    victim.settle(problem)
    shutil.rmtree(victim.directory)


def _bytes(run_directory: Path) -> dict[str, str]:
    """Return the hashes of the last checkpoint's weights and moments, of all rollouts, and of the metrics except times
    and memory."""
    last = run_directory / f"checkpoints/step-{STEPS:06d}"
    files = [*last.rglob("*.safetensors"), *run_directory.glob("rollouts/*.jsonl")]
    rows = [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]
    metrics = [{name: value for name, value in row.items() if not name.startswith(VARYING)} for row in rows]
    hashes = {path.relative_to(run_directory).as_posix(): file_sha256(path) for path in files}
    return {**hashes, "metrics.jsonl": json.dumps(metrics)}


def _steps_lost(victim: Victim) -> int:
    """Return the recorded steps beyond the newest checkpoint, which the next start makes again."""
    found = newest_valid(victim.directory / "checkpoints", lambda text: None)
    return max(steps_recorded(victim.directory), default=0) - (found.step if found else 0)


def _seconds_of_a_run(victim: Victim) -> float:
    started, log = time.monotonic(), victim.directory.with_suffix(".log")
    _come_to_an_end(victim, forked(victim.kind, victim.recipe, log), log)
    return time.monotonic() - started


def _at_any_time(seconds: float, victim: Victim, process: int, draw: random.Random) -> bool:
    """Wait for a random part of the seconds that a whole run takes. Returns False if the run ended before."""
    return not until(lambda: False, process, seconds * draw.random())


def _inside_a_save(victim: Victim, process: int, draw: random.Random) -> bool:
    """Wait for one of the run's saves, and a random part of it. Returns False if the run ended before."""
    root = victim.directory / "checkpoints"
    found = newest_valid(root, lambda text: None)
    saves_left = (STEPS - (found.step if found else 0)) // SAVE_EVERY
    wanted = draw.randrange(max(1, saves_left)) + 1
    seen: set[str] = set()

    def is_saving() -> bool:
        if root.exists():
            seen.update(path.name for path in root.glob(".step-*.tmp"))
        return len(seen) >= wanted

    if until(is_saving, process, LONGEST_RUN_SECONDS, pause=0.0005):
        return False
    time.sleep(SAVE_SECONDS * draw.random())
    return _lives(process)


def until(is_time: Callable[[], bool], process: int, seconds: float, pause: float = 0.005) -> bool:
    """Return whether the process ended before `is_time` was true and before the seconds were over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not is_time():
        if not _lives(process):
            return True
        time.sleep(pause)
    return False


def forked(kind: str, recipe: Path, log: Path, *overrides: str, before: Callable[[], object] = lambda: None) -> int:
    """Run the command in a fork of this process, and return its id. `before` is what the fork does first."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        take_own_locks()
        os.setsid()
        os.environ.update(environment())
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stderr = sys.stdout = open(descriptor, "w", encoding="utf-8", buffering=1)  # noqa: SIM115
        before()
        code = main([kind, str(recipe), *overrides])
    finally:
        os._exit(code)


_ended: dict[int, int] = {}  # exit codes of forks that were waited for


def _lives(process: int) -> bool:
    if process in _ended:
        return False
    found, status = os.waitpid(process, os.WNOHANG)
    if found:
        _ended[process] = os.waitstatus_to_exitcode(status)
    return not found


def waited(process: int, seconds: float) -> int:
    """Return the exit code. A fork that takes longer is killed."""
    deadline = time.monotonic() + seconds
    while _lives(process):
        if time.monotonic() > deadline:
            os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
    return _ended[process]
