"""Groups that were sampled but not trained on yet, saved for a checkpoint: tensors in safetensors, the rest in JSON. A
prompt is stored as its index in the global order, so that any number of ranks can continue."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from tiercel.errors import RunError
from tiercel.models.weights.checkpoint_files import read_tensors
from tiercel.regular_files import LARGEST_FILE, read_json, require_regular
from tiercel.reward_types import decode_turn
from tiercel.types import Completion, EncodedImage, EncodedPrompt, Group, ImagePlan, RewardValue, Trajectory
from tiercel.writing import reading

TENSORS = "pending.safetensors"
GROUPS = "pending.json"
PICTURE = "picture"


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingGroup:
    """A group without its prompt."""

    index: int  # of the prompt in the global order
    policy_version: int
    completions: tuple[Completion, ...]
    prompt: str | None = None  # a hash of its tokens and pictures; None in files of versions that did not write it

    @classmethod
    def of(cls, group: Group) -> "PendingGroup":
        """Make a pending group of a group."""
        return cls(
            index=group.prompt.index,
            policy_version=group.policy_version,
            completions=group.completions,
            prompt=_hash_of(group.prompt),
        )

    def with_prompt(self, prompt: EncodedPrompt) -> Group | None:
        """Return the group with its prompt, which was encoded again; None if the prompt is another one, because the
        environment's `reset` answered otherwise than before."""
        if self.prompt not in (None, _hash_of(prompt)):
            return None
        return Group(prompt=prompt, completions=self.completions, policy_version=self.policy_version)


def save_pending(directory: Path, groups: Sequence[PendingGroup]) -> None:
    """Write the groups into `directory`; write no file if there are none."""
    if not groups:
        return
    tensors, described = {}, []
    for group in groups:
        completions: list[dict[str, Any]] = []
        for number, completion in enumerate(group.completions):
            name = f"{group.index}.{number}"
            tensors[f"{name}.token_ids"] = completion.token_ids_L.clone()  # completions of one part may share it
            tensors[f"{name}.logprobs"] = completion.logprobs_L.clone()
            entry = {"text": completion.text, "is_truncated": completion.is_truncated, "seed": completion.seed}
            entry |= {"forks": completion.forks} if completion.forks else {}
            if completion.trajectory is not None:
                tensors[f"{name}.is_sampled"] = completion.trajectory.is_sampled_L.clone()
                tensors[f"{name}.positions"] = completion.trajectory.positions_DL.contiguous().clone()
                tensors |= _picture_tensors(completion.trajectory.images)
                entry["trajectory"] = _trajectory_entry(completion.trajectory)
            completions.append(entry)
        entry = {"index": group.index, "policy_version": group.policy_version, "prompt": group.prompt}
        described.append({**entry, "completions": completions})
    save_file(tensors, directory / TENSORS)
    text = json.dumps(described, ensure_ascii=False)
    (directory / GROUPS).write_text(text, encoding="utf-8", errors="replace")  # halves of surrogate pairs


def load_pending(directory: Path) -> dict[int, PendingGroup]:
    """Read the groups, by the prompt's index; empty if the checkpoint has none. Raises RunError if the files are not as
    `save_pending` writes them, and ModelError if the tensors cannot be read."""
    if not os.path.lexists(directory / GROUPS):
        return {}
    with reading(directory):
        require_regular(directory / TENSORS)
    tensors = read_tensors(directory / TENSORS)
    try:
        entries = read_json(directory / GROUPS, LARGEST_FILE)
        groups = [_pending_group(entry, tensors) for entry in entries]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{directory / GROUPS} does not contain the groups of a step: {error}") from error
    return {group.index: group for group in groups}


def _hash_of(prompt: EncodedPrompt) -> str:
    found = sha256(prompt.token_ids_P.numpy().tobytes())
    for image in prompt.images:
        found.update(image.sha256.encode())
    return found.hexdigest()[:32]


def _picture_tensors(images: Sequence[EncodedImage]) -> dict[str, Tensor]:
    """Name the pixels by the hash of their picture, so that each picture is written once."""
    return {
        f"{PICTURE}.{image.sha256}.{view}": pixels.contiguous()
        for image in images
        for view, pixels in enumerate(image.views)
    }


def _trajectory_entry(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "images": [
            {"sha256": image.sha256, "plan": asdict(image.plan), "views": len(image.views)}
            for image in trajectory.images
        ],
        "picture_spans": trajectory.picture_spans,
        "turns": [asdict(turn) for turn in trajectory.turns],
        "outcome": None if trajectory.outcome is None else asdict(trajectory.outcome),
        "failure": trajectory.failure,
    }


def _image(entry: dict[str, Any], tensors: Mapping[str, Tensor]) -> EncodedImage:
    plan: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in entry["plan"].items()
    }
    sha256 = entry["sha256"]
    views = tuple(tensors[f"{PICTURE}.{sha256}.{view}"] for view in range(entry["views"]))
    return EncodedImage(sha256=sha256, plan=ImagePlan(**plan), views=views)


def _trajectory(entry: dict[str, Any], name: str, tensors: Mapping[str, Tensor]) -> Trajectory:
    return Trajectory(
        is_sampled_L=tensors[f"{name}.is_sampled"],
        positions_DL=tensors[f"{name}.positions"],
        images=tuple(_image(image, tensors) for image in entry["images"]),
        picture_spans=tuple((start, stop) for start, stop in entry["picture_spans"]),
        turns=tuple(decode_turn(turn) for turn in entry["turns"]),
        outcome=None if entry["outcome"] is None else RewardValue(**entry["outcome"]),
        failure=entry["failure"],
    )


def _pending_group(entry: dict[str, Any], tensors: dict[str, Tensor]) -> PendingGroup:
    index = entry["index"]
    return PendingGroup(
        index=index,
        policy_version=entry["policy_version"],
        prompt=entry.get("prompt"),
        completions=tuple(
            _completion(completion, f"{index}.{number}", tensors)
            for number, completion in enumerate(entry["completions"])
        ),
    )


def _completion(entry: dict[str, Any], name: str, tensors: Mapping[str, Tensor]) -> Completion:
    return Completion(
        token_ids_L=tensors[f"{name}.token_ids"],
        logprobs_L=tensors[f"{name}.logprobs"],
        text=entry["text"],
        is_truncated=entry["is_truncated"],
        seed=entry["seed"],
        trajectory=_trajectory(entry["trajectory"], name, tensors) if "trajectory" in entry else None,
        forks=tuple(entry.get("forks", ())),
    )
