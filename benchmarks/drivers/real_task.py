"""The run of `tiercel demo --real` as a peer gets it: model, rows in the order of their steps, reward, what is kept.

This is imported in every framework's environment, so it needs only Python's standard library.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GROUP_SIZE = 8
PROMPTS_PER_STEP = 8
COMPLETION_TOKENS = 4
LEARNING_RATE = 4e-4
WARMUP_STEPS = 3
LORA_RANK = 8
LORA_ALPHA = 16
SAVE_EVERY = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class RealTask:
    """The task of one driver. The recipe demo-real-grpo.yaml has the same numbers."""

    model: Path
    rows: Path  # JSON Lines: question, picture, answer; `PROMPTS_PER_STEP` of them are a step
    out: Path
    steps: int
    seed: int

    def read_rows(self, per_step: int = PROMPTS_PER_STEP) -> list[dict[str, Any]]:
        """Return the rows, as many as the steps need. Raises ValueError if there are fewer."""
        lines = self.rows.read_text(encoding="utf-8").splitlines()[: self.steps * per_step]
        if len(lines) < self.steps * per_step:
            raise ValueError(f"{self.rows}: has {len(lines)} rows for {self.steps} steps; write more")
        return [json.loads(line) for line in lines]


def parser_of_tasks(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that reads the fields of RealTask."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "rows", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("steps", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return parser


def parse_real_task(description: str | None) -> RealTask:
    """Read the task from the command line."""
    return RealTask(**vars(parser_of_tasks(description).parse_args()))


def exact(completions: Sequence[str], answers: Sequence[str]) -> list[float]:
    """Return 1 for each completion that is its answer, word for word, and else 0."""
    return [float(said.strip() == answer) for said, answer in zip(completions, answers, strict=True)]


@dataclass(kw_only=True, slots=True)
class StepLog:
    """Writes the mean reward and the seconds of each step into steps.jsonl, as soon as the step has ended."""

    file: Path
    rewards: list[float] = field(default_factory=list)  # of the step that is under way
    _started: float = field(default_factory=time.perf_counter)

    def begin(self) -> None:
        """Begin the first step; loading is not a part of it."""
        self._started = time.perf_counter()

    def end_step(self, step: int) -> None:
        """Write the step that has ended."""
        now = time.perf_counter()
        row = {"step": step, "reward": sum(self.rewards) / len(self.rewards), "seconds": now - self._started}
        self._started = now
        self.rewards.clear()
        with open(self.file, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
