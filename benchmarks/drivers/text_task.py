"""The runs of benchmarks.real_text as TRL gets them: method, model, rows in the order of their steps, what is kept.

This is imported in every framework's environment, so it needs only Python's standard library.
"""

from dataclasses import dataclass
from typing import Any

from benchmarks.drivers.real_task import RealTask, parser_of_tasks

GROUP_SIZE = 8
COMPLETION_TOKENS = 6
LEARNING_RATES = {"sft": 4e-4, "dpo": 1e-4, "grpo": 2e-4}
ROWS_PER_STEP = {"sft": 16, "dpo": 16, "grpo": 8}
DPO_BETA = 0.1
WARMUP_STEPS = 3
LORA_RANK = 8
LORA_ALPHA = 16
SAVE_EVERY = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TextTask(RealTask):
    """The task of one run. Its rows have a question, an answer, and a wrong answer."""

    method: str  # a key of LEARNING_RATES

    def rows_of_steps(self) -> list[dict[str, Any]]:
        """Return the rows, as many as the steps need. Raises ValueError if there are fewer."""
        return self.read_rows(ROWS_PER_STEP[self.method])


def parse_text_task(description: str | None) -> TextTask:
    """Read the task from the command line."""
    parser = parser_of_tasks(description)
    parser.add_argument("--method", choices=tuple(LEARNING_RATES), required=True)
    return TextTask(**vars(parser.parse_args()))
