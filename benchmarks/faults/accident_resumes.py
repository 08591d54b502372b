"""The same command after an accident in the run's directory: it continues as if nothing had happened, or says what is
wrong.

A run of two steps is to make a third. Whatever is in place of one of its files, it ends with the weights of an
undisturbed run, or names the file and changes nothing. It never starts over, and never ends in a traceback, waits, or
takes gigabytes.
"""

import time
from pathlib import Path

from benchmarks.faults.accidents import ACCIDENTS, IN_PLACE, LINES, STEPS, made_run, mended, take_limits
from benchmarks.faults.figure import Figure, Outcome, Size, figure_of
from benchmarks.faults.kills import forked, waited
from tiercel.errors import EXIT_USER
from tiercel.runs.checkpoints import directory_of
from tiercel.runs.files import file_sha256
from tiercel.runs.json_lines import Rows

CASES = {"short": 12, "full": 120}
SECONDS = 20.0
FILES = (
    *("config.yaml", "env.json", "chosen.json", "end.json", ".lock", "log.txt", "metrics.jsonl", "index.jsonl"),
    *("bad_rows.jsonl", "pulse/rank-0.json", "rollouts/step-000002.jsonl", "report.html"),
    *(f"checkpoints/step-000002/{name}" for name in ("MANIFEST.json", "state.json", "adapter/adapter_config.json")),
)
Case = tuple[str, str]


def accident_resumes(size: Size, seed: int, work: Path) -> Figure:
    """Run as many cases as fit, spread over all. `seed` shifts the choice."""
    started = time.perf_counter()
    recipe = made_run(work)
    run, kept = recipe.with_suffix(""), work / "kept"
    run.rename(kept)
    expected = _weights(run) if (problem := _resumed(recipe, kept, None)) is None else problem
    cases: list[Case] = [(name, file) for file in FILES for name in IN_PLACE]
    cases += [(name, file) for file in FILES if file.endswith(".jsonl") for name in LINES]
    step = max(1, len(cases) // CASES[size])
    outcomes: list[Outcome] = []
    for case in cases[seed % step :: step]:
        problem = _resumed(recipe, kept, case)
        if problem is None and (weights := _weights(run)) not in (None, expected):
            problem = f"it ends with other weights, {weights}, not {expected}"
        outcomes.append((", ".join(case), problem))
    return figure_of("resumes after accidents", outcomes, seed=seed, seconds=time.perf_counter() - started)


def _weights(run: Path) -> str | None:
    """Return the hash of the third step's weights, or None if the run did not get that far."""
    file = directory_of(run / "checkpoints", STEPS + 1) / "adapter/adapter_model.safetensors"
    return file_sha256(file) if file.is_file() else None


def _resumed(recipe: Path, kept: Path, case: Case | None) -> str | None:
    """Resume the run after an accident, and return what is wrong with how it ends."""
    run, log = recipe.with_suffix(""), recipe.with_suffix(".log")
    mended(run, kept)
    if case is not None:
        ACCIDENTS[case[0]](run / case[1])
    began = time.monotonic()
    code = waited(forked("grpo", recipe, log, f"train.steps={STEPS + 1}", before=take_limits), SECONDS)
    took, said = time.monotonic() - began, log.read_text(errors="replace")
    if "Traceback" in said or code not in (0, EXIT_USER):
        return f"ended with {code} after {took:.1f} s: {said[-600:]}"
    if code == EXIT_USER:
        name = Path(case[1]).name if case is not None else ""
        return None if name in said else f"names no file: {said[-600:]}"
    if "going on from step" not in said:
        return f"began anew: {said[-600:]}"
    steps = [row["step"] for row in Rows(run / "metrics.jsonl") if type(row.get("step")) is int]
    is_told = case is not None and case[1] in said
    return None if is_told or steps[-3:] == [1, 2, 3] else f"metrics have the steps {steps}, and nothing is said"
