"""The steps that .ci/run runs for a commit: the core cases of every suite, a third of the rest, which the commit's hash
chooses, and whole suites if the change touches what they protect, the quickest first, for as long as the run stays
within its time. It uses only the standard library, because it runs before any environment exists.

    python3 -m tools.ci_plan                  the steps for HEAD, a line each: `test-scale THIRD=1`
    python3 -m tools.ci_plan --all            every step, whole
    python3 -m tools.ci_plan --why COMMIT     with the reason of each step
    python3 -m tools.ci_plan --late STEP      the step with its core cases alone, for a run that has become slow
"""

import argparse
import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

THIRDS = 3
CORE_ALONE = ("gpu-null",)  # whole, it takes most of an hour
# Suites that take one process at a time, or have few cases, the longest first. .ci/run runs two of them side by side;
# it knows them by ONE_WORKER.
BESIDE = ("test-real", "test-quantized", "test-wheel", "gpu-null", "test-services", "test-view")
ONE_WORKER = "WORKERS=1"
STEPS = (
    *("lint", "types", "test", "site", *BESIDE),
    "test-lowest",  # early, so that a slow machine does not leave out what `make test` left to it
    *("test-catalogue", "test-families", "test-generic", "test-scale", "test-vllm"),
)

# Seconds on two quiet cores, environments included, of a plan in which every divided suite runs a third, and what the
# rest of each suite adds. If a change forces more than fits, the quickest suites run whole.
SECONDS_OF_THIRDS = 2400
SECONDS_OF_THE_REST = {
    "test-generic": 0,
    "test-wheel": 100,
    "test-quantized": 50,
    "test-families": 60,
    "test-real": 80,
    "test-catalogue": 200,
    "test-lowest": 300,
    "test-scale": 650,
    "test-vllm": 800,
}
SECONDS_OF_A_RUN = 2600  # of the 45 minutes; the rest is for a slow machine

DIVIDED = tuple(step for step in STEPS if step in SECONDS_OF_THE_REST)
ALWAYS_WHOLE = tuple(step for step in STEPS if step not in DIVIDED + CORE_ALONE)

# A changed path that begins with the left side makes the suites on the right side run whole.
FORCED = {
    "Makefile": (),  # a changed recipe of a step is run by the step's core cases
    "constraints.txt": ("test-families", "test-quantized"),
    "pyproject.toml": ("test-lowest",),
    "benchmarks/environments/vllm.txt": ("test-vllm",),
    "benchmarks/faults/": ("test-catalogue",),
    "benchmarks/generic": ("test-generic",),
    "tiercel/algorithms/": ("test-catalogue",),
    "tiercel/demo/real": ("test-real",),
    "tiercel/distributed/": ("test-scale",),
    "tiercel/environments/": ("test-catalogue",),
    "tiercel/packing/": ("test-catalogue", "test-generic"),
    "tiercel/models/": ("test-families", "test-generic", "test-lowest"),
    "tiercel/models/layers/quantized": ("test-quantized",),
    "tiercel/planning/": ("test-catalogue",),
    "tiercel/rollout/vllm/": ("test-vllm",),
    "tiercel/rewards/runtime/": ("test-catalogue",),
    "tiercel/sandbox/": ("test-catalogue",),
    "tiercel/training/": ("test-catalogue",),
    "tiercel/training/strategy_choice.py": ("test-scale",),
    "examples/": ("test-wheel",),
    "notebooks/": ("test-wheel",),
    "tiercel/api/": ("test-wheel",),
    "tests/distributed/": ("test-scale",),
    "tests/models/": ("test-families",),
    "tests/models/test_generic": ("test-generic",),
    "tests/real/": ("test-real",),
    "tests/tiny_models.py": ("test-families",),
    "tests/vllm/": ("test-vllm",),
}


@dataclass(frozen=True, slots=True)
class Step:
    """A make target, and the third of its cases that runs in addition to its core cases (None: all of them; `core`:
    none of them)."""

    target: str
    third: int | str | None
    why: str
    left_to_lowest: int | None = None  # the third that test-lowest runs instead

    @property
    def arguments(self) -> str:
        words = [self.target]
        words += [] if self.third is None else [f"THIRD={self.third}"]
        words += [] if self.left_to_lowest is None else [f"LEFT_TO_LOWEST={self.left_to_lowest}"]
        is_long = self.target in CORE_ALONE and self.third is None
        words += [ONE_WORKER] if self.target in BESIDE and not is_long else []
        return " ".join(words)


def plan_steps(commit: str, changed: Iterable[str]) -> list[Step]:
    """Choose the steps for a commit, given by its full hash, that changes these paths."""
    third = int(commit[:8], 16) % THIRDS
    forced = {
        suite: (path, start)
        for path in changed
        for start, suites in FORCED.items()
        if path.startswith(start)
        for suite in suites
    }
    whole = _fitting(forced)
    part = f"core cases and third {third} of the rest, by the commit's hash"

    def step(target: str) -> Step:
        if target == "test":
            shared = f"always; its third {third} runs in test-lowest, with the lowest versions"
            return Step(target, None, shared, left_to_lowest=third)
        if target in CORE_ALONE:
            return Step(target, "core", "core cases; all of it takes too long")
        if target in ALWAYS_WHOLE:
            return Step(target, None, "always whole")
        if target in whole:
            return Step(target, None, f"whole, since {forced[target][0]} changed")
        if target in forced:
            return Step(target, third, f"{part}; {forced[target][0]} changed, but all of it takes too long")
        return Step(target, third, part)

    return [step(target) for target in STEPS]


def _fitting(forced: Iterable[str]) -> set[str]:
    """Choose the suites that run whole: the quickest one in any case, then those that fit into a run's time."""
    whole: set[str] = set()
    seconds = SECONDS_OF_THIRDS
    for target in sorted(forced, key=SECONDS_OF_THE_REST.__getitem__):
        seconds += SECONDS_OF_THE_REST[target]
        if seconds <= SECONDS_OF_A_RUN or not whole:
            whole.add(target)
    return whole


def core_alone(step: str) -> str:
    """Return a step, as it is given to make, with the core cases of its suite alone; other steps as they are."""
    target, *words = step.split()
    others = [word for word in words if not word.startswith("THIRD=")]
    return " ".join([target, "THIRD=core", *others]) if target in DIVIDED else step


def plan_everything() -> list[Step]:
    """Return every step, whole."""
    return [Step(target, None, "everything was asked for") for target in STEPS]


def changed_paths(commit: str, base: str | None, hours: int = 4) -> list[str]:
    """Return the paths that differ between a base and a commit. The default base is the newest ancestor that is at
    least `hours` older than the commit (a working session)."""
    if base is None:
        committed_at = int(_git("show", "-s", "--format=%ct", commit))
        before = committed_at - hours * 3600
        base = _git("rev-list", "-1", f"--before={before}", commit)
    if not base:  # the whole history is younger, so everything is new
        return _git("ls-tree", "-r", "--name-only", commit).splitlines()
    return _git("diff", "--name-only", "--no-renames", base, commit).splitlines()


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="HEAD")
    parser.add_argument("--base", help="the commit that the change started from (default: four hours earlier)")
    parser.add_argument("--all", action="store_true", help="every step, whole")
    parser.add_argument("--late", metavar="STEP", help="print this step with its core cases alone")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--why", action="store_true", help="print the reason of each step")
    form.add_argument("--json", action="store_true", help="print a JSON list")
    arguments = parser.parse_args()
    if arguments.late:
        print(core_alone(arguments.late))
        return
    if arguments.all:
        steps = plan_everything()
    else:
        commit = _git("rev-parse", arguments.commit)
        steps = plan_steps(commit, changed_paths(commit, arguments.base or None))
    if arguments.json:
        print(json.dumps([step.arguments for step in steps]))
        return
    for step in steps:
        print(f"{step.arguments:36} {step.why}" if arguments.why else step.arguments)


if __name__ == "__main__":
    main()
