"""Save and load groups that were sampled but not trained on yet, for a checkpoint: tensors in safetensors, the rest in
JSON. A prompt is stored as its index in the global order, so that any number of ranks can continue."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from tiercel.errors import RunError
from tiercel.models.loading import read_tensors
from tiercel.types import Completion, EncodedPrompt, Group

TENSORS = "pending.safetensors"
GROUPS = "pending.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingGroup:
    """Holds a group without its prompt."""

    index: int  # of the prompt in the global order
    policy_version: int
    completions: tuple[Completion, ...]

    @classmethod
    def of(cls, group: Group) -> "PendingGroup":
        """Make a pending group of a group."""
        return cls(index=group.prompt.index, policy_version=group.policy_version, completions=group.completions)

    def with_prompt(self, prompt: EncodedPrompt) -> Group:
        """Return the group with its prompt, which was encoded again."""
        return Group(prompt=prompt, completions=self.completions, policy_version=self.policy_version)


def save_pending(directory: Path, groups: Sequence[PendingGroup]) -> None:
    """Write the groups into `directory`; write no file where there are none."""
    if not groups:
        return
    tensors, described = {}, []
    for group in groups:
        completions: list[dict[str, Any]] = []
        for number, completion in enumerate(group.completions):
            tensors[f"{group.index}.{number}.token_ids"] = completion.token_ids_L.contiguous()
            tensors[f"{group.index}.{number}.logprobs"] = completion.logprobs_L.contiguous()
            completions.append(
                {"text": completion.text, "is_truncated": completion.is_truncated, "seed": completion.seed}
            )
        described.append({"index": group.index, "policy_version": group.policy_version, "completions": completions})
    save_file(tensors, directory / TENSORS)
    (directory / GROUPS).write_text(json.dumps(described, ensure_ascii=False), encoding="utf-8")


def load_pending(directory: Path) -> dict[int, PendingGroup]:
    """Read the groups, by the prompt's index; empty where the checkpoint has none. Raises RunError where the files are
    not those that `save_pending` writes, and ModelError where the tensors cannot be read."""
    if not (directory / GROUPS).exists():
        return {}
    tensors = read_tensors(directory / TENSORS)
    try:
        entries = json.loads((directory / GROUPS).read_text(encoding="utf-8"))
        groups = [_pending_group(entry, tensors) for entry in entries]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise RunError(f"{directory / GROUPS} does not have the groups of a step: {error}") from error
    return {group.index: group for group in groups}


def _pending_group(entry: dict[str, Any], tensors: dict[str, Tensor]) -> PendingGroup:
    index = entry["index"]
    return PendingGroup(
        index=index,
        policy_version=entry["policy_version"],
        completions=tuple(
            Completion(
                token_ids_L=tensors[f"{index}.{number}.token_ids"],
                logprobs_L=tensors[f"{index}.{number}.logprobs"],
                text=completion["text"],
                is_truncated=completion["is_truncated"],
                seed=completion["seed"],
            )
            for number, completion in enumerate(entry["completions"])
        ),
    )
