"""Lines of tokens/: what was measured at each token of a prompt's completions, as JSON. Imports no torch.

The run writes them for the first prompts of a step (`rollout.record_tokens`), and the live page reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tiercel.runs.group_records import Finite

FOLDER = "tokens"
Values = tuple[Finite, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRecord:
    """The tokens of a completion that the policy drew, in nats; all parts are equally long. None: not computed."""

    texts: tuple[str, ...]
    logprobs: Values  # of the engine that drew them
    entropies: Values | None  # of the learner's distribution
    gaps: Values | None  # the learner's logprob less the engine's


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupTokens:
    """The completions of a prompt, in the order of rollouts/."""

    index: int  # of the prompt in the global order
    completions: tuple[TokenRecord, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the fields in the order of the file."""
        return _FORM.dump_python(self, mode="json")

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "GroupTokens":
        """Read a line. Raises ValueError where it is malformed."""
        return _FORM.validate_python(record)


_FORM = TypeAdapter(GroupTokens)


def tokens_path(run: Path, step: int) -> Path:
    """Return the file of a run directory that holds a step's tokens."""
    return run / FOLDER / f"step-{step:06d}.jsonl"
