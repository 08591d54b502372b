"""A save that crashes at each of its file operations leaves either the previous checkpoint or its own, whole."""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.crashing_disk import ENDINGS, Crash, CrashingDisk, Ending
from benchmarks.faults.figure import Figure, Outcome, Size, figure_of
from benchmarks.faults.tiny_run import TinyRun, chosen, hashes, make_tiny_run
from tiercel.runs.checkpoints import directory_of, newest_valid

SHORT_SCENARIOS = 2
SHORT_STRIDE = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """What is in the run directory before `step` is saved, and which steps may be found after a crash."""

    name: str
    prepare: Callable[[TinyRun, Path], None]
    step: int
    found: frozenset[int | None]
    keep: int = 2


def _save_steps(*steps: int) -> Callable[[TinyRun, Path], None]:
    def prepare(run: TinyRun, path: Path) -> None:
        for step in steps:
            run.save(path, step)

    return prepare


def _damaged(run: TinyRun, path: Path) -> None:
    _save_steps(1, 2, 3)(run, path)
    shutil.rmtree(directory_of(path / "checkpoints", 3) / "adapter")


def _interrupted(run: TinyRun, path: Path) -> None:
    _damaged(run, path)
    checkpoints = path / "checkpoints"
    directory_of(checkpoints, 3).rename(directory_of(checkpoints, 9))
    shutil.copytree(directory_of(checkpoints, 2), checkpoints / ".step-000003.tmp")


SCENARIOS = (
    Scenario(name="the only one is pruned", prepare=_save_steps(2), step=3, found=frozenset({2, 3}), keep=1),
    Scenario(name="in place of a damaged one", prepare=_damaged, step=3, found=frozenset({2, 3})),
    Scenario(name="the first", prepare=_save_steps(), step=3, found=frozenset({None, 3})),
    Scenario(name="the same step again", prepare=_save_steps(3), step=3, found=frozenset({3})),
    Scenario(name="after an interrupted save", prepare=_interrupted, step=3, found=frozenset({2, 3})),
)


def crashes(size: Size, seed: int, work_dir: Path) -> Figure:
    """Run every operation of every scenario's save with every ending. `seed` shifts what a short run leaves out."""
    started = time.perf_counter()
    run = make_tiny_run(work_dir)
    outcomes: list[Outcome] = []
    operations = 0
    for scenario in SCENARIOS if size == "full" else SCENARIOS[:SHORT_SCENARIOS]:
        place = work_dir / scenario.name.replace(" ", "-")
        before = place / "before"
        (before / "checkpoints").mkdir(parents=True)
        scenario.prepare(run, before)
        names, whole = _undisturbed(run, scenario, before, place)
        operations += len(names)
        points = [(at, ending) for at in range(len(names)) for ending in ENDINGS if _differs(names[at], ending)]
        for at, ending in chosen(points[seed % SHORT_STRIDE if size == "short" else 0 :], size, SHORT_STRIDE):
            case = f"{scenario.name}, {ending} at operation {at} ({names[at]})"
            outcomes.append((case, _crashed(run, scenario, before, place / "try", at, ending, whole)))
    return figure_of(
        "crash at every file operation of a save",
        outcomes,
        seed=seed,
        seconds=time.perf_counter() - started,
        figures={"operations": operations},
    )


def _differs(operation: str, ending: Ending) -> bool:
    """Return whether the ending makes a difference, because only writes can be done by half."""
    return ending != "half" or operation == "write"


def _undisturbed(
    run: TinyRun, scenario: Scenario, before: Path, place: Path
) -> tuple[list[str], dict[int, dict[str, str]]]:
    """Return the operations of the save, and the files of each checkpoint as they are without a crash."""
    after = place / "undisturbed"
    shutil.copytree(before, after)
    disk = CrashingDisk(after, place / "undisturbed-aside")
    with disk.watched():
        run.save(after, scenario.step, scenario.keep)
    steps = {step for step in scenario.found if step is not None}
    roots = {step: after if step == scenario.step else before for step in steps}
    return disk.operations, {step: hashes(directory_of(root / "checkpoints", step)) for step, root in roots.items()}


def _crashed(
    run: TinyRun,
    scenario: Scenario,
    before: Path,
    place: Path,
    at: int,
    ending: Ending,
    whole: dict[int, dict[str, str]],
) -> str | None:
    """Return what is wrong with the directory after a crash, or with the save that follows it."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(before, place / "run")
    disk = CrashingDisk(place / "run", place / "aside", at, ending)
    try:
        with disk.watched():
            run.save(place / "run", scenario.step, scenario.keep)
        return "the save did not crash"
    except Crash:
        pass
    left = disk.remains(place / "left")
    found = newest_valid(left / "checkpoints", lambda text: None)
    step = None if found is None else found.step
    if step not in scenario.found:
        return f"found {step}, not one of {sorted(scenario.found, key=str)}"
    if found is not None and hashes(found.path) != whole[found.step]:
        return f"step {step} is not as it was saved"
    run.save(left, scenario.step)
    again = newest_valid(left / "checkpoints", lambda text: None)
    if again is None or hashes(again.path) != whole[scenario.step]:
        return "the save that follows is not found"
    return None
