"""Part b: the demo's SFT and GRPO on the card, killed by SIGKILL in the middle and resumed, compared with unbroken
runs.

Both run with train.deterministic. Required: every step once, and after the kill the same loss, gradient norm and reward
to rounding. Whether the trained weights have the same bytes is reported, not required.
"""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.running import Cell, verdict
from benchmarks.gpu.setup import ROOT, Setup
from examples.pairs.pointing import PRACTICE, START, WARMUP
from examples.scenes import write_scenes
from tiercel.runs.directory import read_metrics

LIMIT = 1e-3  # of the difference, divided by 1 + the unbroken run's value
COMPARED = ("loss", "grad_norm", "reward/mean")
PATIENCE_SECONDS = 400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Steps of each run, the step after which it is killed, prompts per step, and steps of the warm-up before GRPO."""

    steps: int
    killed_after: int
    prompts: int
    warmup: int


SIZES = Sizes(steps=24, killed_after=15, prompts=24, warmup=80)
TOY_SIZES = Sizes(steps=4, killed_after=2, prompts=4, warmup=2)


def killed_cells(is_toy: bool) -> Iterator[Cell]:
    """Yield one cell for each kind of run."""
    for kind in ("sft", "grpo"):
        yield Cell(part="b", name=f"{kind} of the demo, killed and resumed", run=partial(killed_check, kind))


def killed_check(kind: str, setup: Setup) -> dict[str, Any]:
    """Run once without a break and once with one."""
    sizes = TOY_SIZES if setup.is_toy else SIZES
    with TemporaryDirectory() as folder:
        runs = DemoRuns(Path(folder), sizes)
        model = START if kind == "sft" else runs.warmed_up()
        whole, broken = runs.words(kind, model, "whole"), runs.words(kind, model, "broken")
        run_to_end(whole)
        kill_after(broken, runs.folder / "broken", sizes.killed_after)
        run_to_end(broken)
        rows = [read_metrics(runs.folder / name) for name in ("whole", "broken")]
        hashes = [weights_hash(runs.folder / name) for name in ("whole", "broken")]
    return {
        **verdict(largest_difference(*rows), LIMIT, "loss, gradient norm and reward of every step"),
        "steps": sizes.steps,
        "killed_after": sizes.killed_after,
        "has_same_bytes": hashes[0] == hashes[1],
        "last_row": rows[0][-1],
    }


class DemoRuns:
    """The demo's rows in a folder, and command lines of runs there."""

    def __init__(self, folder: Path, sizes: Sizes):
        self.folder, self.sizes = folder, sizes
        count = sizes.prompts * sizes.steps
        write_scenes(folder, replace(WARMUP, count=max(count, 48 * sizes.warmup)))
        write_scenes(folder, replace(PRACTICE, count=count))

    def words(self, kind: str, model: Path, output: str, **changes: object) -> list[str]:
        """Return the words of `tiercel sft` or `grpo` with the demo's recipe, but short, saved often, and without
        evaluation."""
        rows = {"sft": "warmup", "grpo": "practice"}[kind]
        keys = {
            "model.path": model,
            "data.train": self.folder / f"{rows}.jsonl",
            "data.eval": "null",
            "optim.prompts_per_step": self.sizes.prompts,
            "optim.warmup_steps": 0,
            "train.epochs": "null",
            "train.steps": self.sizes.steps,
            "train.save_every": max(1, self.sizes.steps // 4),
            "train.deterministic": "true",
            "output": self.folder / output,
            **changes,
        }
        return [
            kind,
            str(ROOT / "recipes" / f"demo-pointing-{kind}.yaml"),
            *(f"{key}={value}" for key, value in keys.items()),
        ]

    def warmed_up(self) -> Path:
        """Train the model that the demo's GRPO starts from, and return it."""
        run_to_end(
            self.words(
                "sft",
                START,
                "warm",
                **{"train.steps": self.sizes.warmup, "train.save_every": 1000, "optim.prompts_per_step": 48},
            )
        )
        run_to_end(["export", str(self.folder / "warm"), "--merge"])
        return self.folder / "warm" / "model"


def started(words: Sequence[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return subprocess.Popen(
        [sys.executable, "-m", "tiercel", *words],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run_to_end(words: Sequence[str]) -> None:
    """Run a command to its end. Raises RuntimeError with the end of its output if it fails."""
    process = started(words)
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    if process.returncode != 0:
        raise RuntimeError(f"tiercel {words[0]}: exit code {process.returncode}: {output[-1500:]}")


def kill_after(words: Sequence[str], run: Path, step: int) -> None:
    """Kill a run and its workers as soon as metrics.jsonl has this step. Raises RuntimeError if it ends before or takes
    too long."""
    process = started(words)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if (run / "metrics.jsonl").exists() and any(row["step"] >= step for row in read_metrics(run)):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return
        time.sleep(0.02)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    output, _ = process.communicate()
    raise RuntimeError(f"tiercel {words[0]} ended, or was too slow, before step {step}: {output[-1500:]}")


def largest_difference(whole: Sequence[Mapping[str, Any]], broken: Sequence[Mapping[str, Any]]) -> float:
    """Return the largest difference over all steps, relative to 1 + the first run's value, or infinity if the steps
    differ."""
    if [row["step"] for row in whole] != [row["step"] for row in broken]:
        return float("inf")
    return max(
        abs(mine[key] - other[key]) / (1 + abs(other[key]))
        for other, mine in zip(whole, broken, strict=True)
        for key in COMPARED
        if key in other
    )


def weights_hash(run: Path) -> str:
    """Return the sha256 of the trained files of the newest checkpoint."""
    newest = max((run / "checkpoints").iterdir())
    digest = hashlib.sha256()
    for file in sorted(newest.rglob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()
