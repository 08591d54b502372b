"""Starts that failed before their first step. Another recipe may take over such a run directory."""

import os
import re
from pathlib import Path

from tiercel.regular_files import lines_of, open_regular, remove
from tiercel.runs.checkpoints import list_checkpoints
from tiercel.runs.ending import LOCK
from tiercel.runs.step_files import FOLDERS, steps_of
from tiercel.writing import reading

# Files that belong to a recipe. Logs, reports of stalls, and whatever else a person has put there stay.
_FILES = ("metrics.jsonl", "index.jsonl", "bad_rows.jsonl", "chosen.json", "reference.safetensors", "report.html")
_OWN_NAMES = {  # by folder
    **dict.fromkeys(FOLDERS, r"step-\d{6,}\.jsonl(\.gz)?(\.tmp)?"),
    "journal": r"rank-\d+\.tmp",
    "journal/step-*": r"rank-\d+",
    "policies": r"policy-.+-\d+-[0-9a-f]{8}|unfinished-.+",
    "nonfinite": r"step-\d{6,}(-\d+)?",
    "profiles": r"step-\d{6,}-rank\d+\.json\.gz",
    "trackers": r"id|id\.tmp|tensorboard|wandb|swanlab|trackio|mlflow",
}
MARK = b"# tiercel "  # the first bytes of a run's config.yaml
_BESIDE = ("env.json", LOCK)  # a run has at least one of these next to it
_EVALUATED = b'{"step": 0,'  # the start of the line of the evaluation before the first step


def is_begun(directory: Path) -> bool:
    """Return whether a run has started in a directory. A config.yaml alone, such as a recipe of that name, is not
    enough."""
    config = directory / "config.yaml"
    if not config.is_file() or config.is_symlink() or not any((directory / name).exists() for name in _BESIDE):
        return False
    with open_regular(config) as file:
        return file.read(len(MARK)) == MARK


def has_no_step(run: Path) -> bool:
    """Return whether a directory is a run that has never finished a step."""
    if not (run / "env.json").is_file() or not is_begun(run):
        return False
    if list_checkpoints(run / "checkpoints"):
        return False
    if max(steps_of(run / "rollouts"), default=0) > 1:  # the first was finished, and metrics.jsonl was lost
        return False
    metrics = run / "metrics.jsonl"
    if not os.path.lexists(metrics):
        return True
    with reading(metrics):
        return all(line.startswith(_EVALUATED) for line in lines_of(metrics))


def clear(run: Path) -> None:
    """Remove what a start has left behind, so that a run of another recipe does not continue from it. Anything that
    somebody else has put there stays."""
    for name in _FILES:
        remove(run / name)
    for folder, own in _OWN_NAMES.items():
        for path in list(run.glob(f"{folder}/*")):
            if re.fullmatch(own, path.name) and not path.parent.is_symlink():
                remove(path)
