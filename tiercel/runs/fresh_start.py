"""Which directories a run may begin in, and what it takes over of a start that failed before its first step. Imports no
torch."""

import os
import re
from pathlib import Path

from tiercel.errors import RunError
from tiercel.regular_files import FOLDERS as ALL_FOLDERS
from tiercel.regular_files import lines_of, open_regular, remove
from tiercel.reliability.heartbeat import HEARTBEATS
from tiercel.runs.checkpoints import list_checkpoints
from tiercel.runs.ending import LOCK
from tiercel.runs.step_files import FOLDERS, steps_of
from tiercel.writing import reading

# Files that belong to a recipe. Logs, reports of stalls, and whatever else a person has put there stay.
_FILES = ("metrics.jsonl", "index.jsonl", "bad_rows.jsonl", "chosen.json", "reference.safetensors", "report.html")
_OWN_NAMES = {  # by folder
    **dict.fromkeys(FOLDERS, r"step-\d{6,}\.jsonl(\.zst|\.gz)?(\.tmp)?"),
    "journal": r"rank-\d+\.tmp",
    "journal/step-*": r"rank-\d+",
    "policies": r"policy-.+-\d+-[0-9a-f]{8}|unfinished-.+",
    "nonfinite": r"step-\d{6,}(-\d+)?",
    "profiles": r"step-\d{6,}-rank\d+\.json\.gz",
    "trackers": r"id|id\.tmp|tensorboard|wandb|swanlab|trackio|mlflow",
}
MARK = b"# tiercel "  # the first bytes of a run's config.yaml
_BESIDE = ("env.json", LOCK)  # a run has at least one of these next to it
# Files that a run may leave behind if it ends before it has written config.yaml.
GIVEN = "given"  # rows, pictures and functions that Python code passed in memory
BEGUN, SIGNS = (LOCK, "config.yaml.tmp", "stall", "log.txt", HEARTBEATS, GIVEN), ".signs-"
_EVALUATED = b'{"step": 0,'  # the start of the line of the evaluation before the first step


def is_begun(directory: Path) -> bool:
    """Return whether a run has started in a directory. A config.yaml alone, such as a recipe of that name, is not
    enough."""
    config = directory / "config.yaml"
    if not config.is_file() or config.is_symlink() or not any((directory / name).exists() for name in _BESIDE):
        return False
    with open_regular(config) as file:
        return file.read(len(MARK)) == MARK


def require_own(path: Path) -> None:
    """Raise RunError if a directory is not a run and cannot become one."""
    if path.exists() and not path.is_dir():
        raise RunError(f"output: {path} is a file; name a directory")
    is_other = path.is_dir() and not is_begun(path)
    if is_other and not all(entry.name in BEGUN or entry.name.startswith(SIGNS) for entry in path.iterdir()):
        raise RunError(
            f"output: {path} is not empty and was not created by a run (a run has .lock, env.json, and a config.yaml "
            f"that begins with {MARK.decode().strip()!r}); name another directory"
        )
    for name in sorted(ALL_FOLDERS):
        if (path / name).is_symlink():
            raise RunError(
                f"output: {path / name} is a link, but a run writes only inside its own directory; put the folder "
                "itself there, or set `output` to a directory that has room"
            )


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
