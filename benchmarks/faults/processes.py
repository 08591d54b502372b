"""Real runs through the command line, each with a mark in its environment that identifies what it leaves behind."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.faults.fault_plan import with_plan
from tests.tiny_models import save_tiny_checkpoint
from tests.training.test_loops import grpo_recipe, merged, sft_recipe, write_rows
from tiercel.config import recipe_to_yaml
from tiercel.config.keys import RECIPES, Kind

FAMILY = "qwen2_5_vl"
MARK = "TIERCEL_FAULT_MARK"
STRUCK = "fault plan:"  # begins the line that a planned fault prints
STALLED = "stalled:"
PREFERENCES: dict[str, dict[str, Any]] = {
    "dpo": {"dpo": {"loss": "mpo"}},
    "kto": {"kto": {"beta": 0.1}},
    "reward": {"ranking": {"margin": 0.5}},
}
SECONDS_TO_BE_GONE = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A command that ended, or was ended."""

    code: int
    said: str  # on stderr
    seconds_from_fault: float | None  # from the planned fault to the end
    seconds_to_stalled: float | None  # from the planned fault to the message of a stall
    left: tuple[str, ...]  # processes that outlived it

    def problem(self, code: int, *texts: str, within: float | None = None) -> str | None:
        """Return what is wrong, or None: the exit code, a text that stderr lacks, an end that took too long, processes
        left."""
        if self.code != code:
            return f"exit code {self.code}, not {code}: {self.said[-500:]}"
        if missing := [text for text in texts if text not in self.said]:
            return f"does not say {missing[0]!r}: {self.said[-500:]}"
        if within is not None and (self.seconds_from_fault is None or self.seconds_from_fault > within):
            return f"ended {self.seconds_from_fault} s after the fault, more than {within:g}"
        return f"left {', '.join(self.left)}" if self.left else None


class TinyRuns:
    """Recipes of tiny runs in a directory, all with the same model and rows."""

    def __init__(self, work: Path):
        self.work = work
        self.checkpoint = save_tiny_checkpoint(FAMILY, work / "model")
        self.rows = write_rows(work)
        records = [json.loads(line) for line in self.rows.read_text().splitlines()]
        for number, record in enumerate(records):
            record |= {"rejected": "no, not that", "label": number % 2 == 0}
        self.rows.write_text("".join(json.dumps(record) + "\n" for record in records))

    def recipe(self, kind: Kind, name: str, **changes: Any) -> Path:
        """Write a recipe file whose run is in the directory `name`, and return it."""
        alone = {
            "data": {"eval": None, "workers": 1, "format": "tiercel"},
            "train": {"steps": 6, "save_every": 2, "threads": 1},
        }
        for section, values in changes.items():
            alone[section] = {**alone[section], **values} if section in alone else values
        if kind == "distill":
            alone["teacher"] = {"path": str(self.checkpoint), "dtype": "float32", "prompt": "{prompt} So?"}
        make = grpo_recipe if kind in ("grpo", "distill") else sft_recipe
        recipe = make(self.checkpoint, self.rows, self.work / name)
        if kind in PREFERENCES:
            alone |= {**PREFERENCES[kind], "learner": {"max_tokens_per_microbatch": 450}}
        own = merged(recipe.model_dump(exclude=set() if kind == "sft" else {"sft"}), alone)
        recipe = RECIPES[kind].model_validate(own)
        file = self.work / f"{name}.yaml"
        file.write_text(recipe_to_yaml(recipe))
        return file


def environment(plan: str = "[]") -> dict[str, str]:
    """Return this process's environment with a fault plan and its own mark."""
    threads = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **threads, **with_plan(plan), MARK: uuid.uuid4().hex}


def run(
    kind: str,
    recipe: Path,
    *arguments: str,
    plan: str = "[]",
    variables: Mapping[str, str] = MappingProxyType({}),
    timeout: float = 240.0,
) -> Ended:
    """Run the command to its end, with more variables in its environment. If it outlasts the timeout, it is killed with
    all its processes."""
    marked = environment(plan) | dict(variables)
    process = subprocess.Popen(
        [sys.executable, "-m", "tiercel", kind, str(recipe), *arguments],
        env=marked,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    lines: list[tuple[float, str]] = []

    def listen() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append((time.monotonic(), line))

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        code = process.wait(timeout)
    except subprocess.TimeoutExpired:
        code = -signal.SIGKILL
        process.kill()
        process.wait()
    ended = time.monotonic()
    left = left_behind(marked[MARK])
    listener.join(SECONDS_TO_BE_GONE)
    struck = [moment for moment, line in lines if line.startswith(STRUCK)]
    stalled = [moment for moment, line in lines if line.startswith(STALLED)]
    return Ended(
        code=code,
        said="".join(line for _, line in lines),
        seconds_from_fault=ended - struck[0] if struck else None,
        seconds_to_stalled=stalled[0] - struck[0] if struck and stalled else None,
        left=tuple(left),
    )


def left_behind(mark: str) -> list[str]:
    """Return the processes with this mark that do not end by themselves. They are killed."""
    deadline = time.monotonic() + SECONDS_TO_BE_GONE
    while (found := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in found:
        os.kill(process, signal.SIGKILL)
    return [str(process) for process in found]


def marked_processes(mark: str) -> list[int]:
    """Return the ids of the processes, without zombies, that have the mark in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            is_marked = f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
            is_zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        if is_marked and not is_zombie:
            found.append(int(entry.name))
    return found


def steps_recorded(run_directory: Path) -> Sequence[int]:
    """Return the steps in metrics.jsonl."""
    file = run_directory / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []
