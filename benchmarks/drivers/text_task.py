"""The runs of benchmarks.real_text as TRL gets them: model, rows in the order of their steps, what is kept.

This is imported in every framework's environment, so it needs only Python's standard library.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GROUP_SIZE = 8
COMPLETION_TOKENS = 6
LEARNING_RATES = {"sft": 4e-4, "dpo": 1e-4, "grpo": 2e-4}
ROWS_PER_STEP = {"sft": 16, "dpo": 16, "grpo": 8}
DPO_BETA = 0.1
WARMUP_STEPS = 3
LORA_RANK = 8
LORA_ALPHA = 16
SAVE_EVERY = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTask:
    """The task of one run."""

    method: str  # a key of LEARNING_RATES
    model: Path
    rows: Path  # JSON Lines: question, answer, wrong
    out: Path
    steps: int
    seed: int

    def read_rows(self) -> list[dict[str, Any]]:
        """Return the rows, as many as the steps need. Raises ValueError if there are fewer."""
        count = self.steps * ROWS_PER_STEP[self.method]
        lines = self.rows.read_text(encoding="utf-8").splitlines()[:count]
        if len(lines) < count:
            raise ValueError(f"{self.rows}: has {len(lines)} rows for {self.steps} steps; write more")
        return [json.loads(line) for line in lines]


def parse_text_task(description: str | None) -> TextTask:
    """Read the task from the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=tuple(LEARNING_RATES), required=True)
    for name in ("model", "rows", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("steps", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    return TextTask(**vars(parser.parse_args()))
