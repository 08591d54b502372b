"""Secrets in environment, recipe and rows, a reward that prints them, a crash that shows them: none is in anything that
was written or printed."""

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.faults.figure import Figure, Outcome, Size, figure_of
from benchmarks.faults.processes import FAMILY
from tests.reliability.test_run_secrets import CRASHING, MARK, SECRETS, write_recipe
from tests.tiny_models import save_tiny_checkpoint
from tiercel.errors import EXIT_DONE, EXIT_TRAINING, EXIT_USER

# what runs, further words, exit code
COMMANDS: dict[str, tuple[list[str], list[str], int]] = {
    "a crash": (["-c", CRASHING, "grpo"], [], 1),
    "going on": (["-m", "tiercel", "grpo"], [], EXIT_DONE),
    "too many failed rewards": (
        ["-m", "tiercel", "grpo"],
        ["reliability.max_failed_reward_fraction=0", "train.steps=5"],
        EXIT_TRAINING,
    ),
    "check": (["-m", "tiercel", "check"], [], EXIT_DONE),
    "a wrong override": (["-m", "tiercel", "check"], [f"hf_token={SECRETS['HF_TOKEN']}"], EXIT_USER),
}
SHORT = ("a wrong override",)


def secrets(size: Size, seed: int, work: Path) -> Figure:
    started = time.perf_counter()
    recipe = write_recipe(save_tiny_checkpoint(FAMILY, work / "model"), work)
    own = {name: value for name, value in os.environ.items() if MARK not in value}  # such as pytest's
    environment = {**own, **SECRETS, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    outcomes: list[Outcome] = []
    files = 0
    for name, (words, more, code) in COMMANDS.items():
        if size == "short" and name not in SHORT:
            continue
        done = subprocess.run(
            [sys.executable, *words, str(recipe), *more],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=300,
            check=False,
        )
        said = done.stdout + done.stderr
        problem = f"{said.count(MARK)} secrets were printed" if MARK in said else None
        if done.returncode != code:
            problem = f"exit code {done.returncode}, not {code}: {said[-300:]}"
        outcomes.append((f"{name}, printed", problem))
        for file in sorted(path for path in (work / "run").rglob("*") if path.is_file()):
            files += 1
            found = file.read_bytes().count(MARK.encode())
            place = file.relative_to(work / "run")
            outcomes.append((f"{name}, {place}", f"{found} secrets were written" if found else None))
    return figure_of(
        "canary secrets",
        outcomes,
        seed=seed,
        seconds=time.perf_counter() - started,
        figures={"secrets": len(SECRETS), "files_searched": files},
    )
