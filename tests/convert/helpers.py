"""Conversion from a script to a draft, and from a draft to the text of a recipe."""

from pathlib import Path

from tiercel.convert.conversion import draft_of
from tiercel.convert.draft import RecipeDraft
from tiercel.convert.launches import Launch, launch_of
from tiercel.convert.shell import commands
from tiercel.convert.text import recipe_text

GRPO = "swift rlhf --rlhf_type grpo --model org/m --dataset r.jsonl --reward_funcs format"
SFT = "swift sft --model org/m --dataset r.jsonl"
REC = "python grpo_jsonl.py --model_name_or_path org/Qwen2-VL --data_file_paths a.jsonl --image_folders x"
TRL = "trl grpo --model_name_or_path org/m --dataset_name r.jsonl"
DPO = "swift rlhf --rlhf_type dpo --model org/m --dataset r.jsonl"
FACTORY = "llamafactory-cli train --do_train --model_name_or_path org/m --dataset r --stage dpo"


def drafted(script: str, file: Path | None = None) -> RecipeDraft:
    """Of the first training command."""
    launches = [launch_of(command, file) for command in commands(script, file)]
    return draft_of(next(launch for launch in launches if isinstance(launch, Launch)))


def values_of(script: str, file: Path | None = None) -> dict[str, object]:
    return drafted(script, file).values


def text_of(script: str, file: Path | None = None) -> str:
    return recipe_text(drafted(script, file))


def told(draft: RecipeDraft) -> str:
    """All notes, a line for each."""
    return "\n".join(f"{note.subject}: {note.text}" for note in draft.notes)
