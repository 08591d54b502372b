"""Thousands of tiny steps: after the first hundreds, the process's memory does not grow."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.faults.figure import Figure, Outcome, Size, figure_of
from benchmarks.faults.processes import TinyRuns, environment, steps_recorded

STEPS = {"short": 200, "full": 2000}
WARM_UP = 0.25  # of the steps
LARGEST_SLOPE = 2048.0  # bytes per step: 4 MB in 2,000 steps, less than one of their thousand tensors
LARGEST_SLOPE_OF_A_SHORT_RUN = 65536.0
SECONDS_BETWEEN_LOOKS = 0.2


def long_runs(size: Size, seed: int, work: Path) -> Figure:
    started = time.perf_counter()
    runs = TinyRuns(work)
    outcomes: list[Outcome] = []
    figures: dict[str, float] = {"steps": STEPS[size]}
    limit = LARGEST_SLOPE if size == "full" else LARGEST_SLOPE_OF_A_SHORT_RUN
    for kind in ("grpo", "sft") if size == "full" else ("sft",):
        train = {"steps": STEPS[size], "save_every": STEPS[size], "threads": 1, "seed": seed}
        steps, resident = _watch(kind, runs.recipe(kind, kind, train=train, data={"workers": 0}), work / kind)
        late = steps >= WARM_UP * STEPS[size]
        slope = float(np.polyfit(steps[late], resident[late], 1)[0]) if late.sum() > 2 else float("inf")
        figures[f"{kind}_slope_bytes_per_step"] = slope
        figures[f"{kind}_resident_mib"] = float(resident[-1]) / 2**20
        problem = None if slope <= limit else f"memory grows by {slope:.0f} bytes a step"
        if steps_recorded(work / kind) != list(range(1, STEPS[size] + 1)):
            problem = f"made {len(steps_recorded(work / kind))} of {STEPS[size]} steps"
        outcomes.append((kind, problem))
    seconds = time.perf_counter() - started
    return figure_of("memory over many steps", outcomes, seed=seed, seconds=seconds, figures=figures)


def _watch(kind: str, recipe: Path, run_directory: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the recorded steps and the resident bytes of the run's process, sampled repeatedly until it ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tiercel", kind, str(recipe)],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    steps, resident = [0], [0]
    metrics = run_directory / "metrics.jsonl"
    page = os.sysconf("SC_PAGE_SIZE")
    try:
        while process.poll() is None:
            time.sleep(SECONDS_BETWEEN_LOOKS if len(steps) > 5 else 0.05)
            try:
                pages = int(Path(f"/proc/{process.pid}/statm").read_text(encoding="ascii").split()[1])
            except (OSError, IndexError):
                break
            done = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if pages and done > steps[-1]:
                steps.append(done)
                resident.append(pages * page)
        process.wait()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
    return np.array(steps), np.array(resident)
