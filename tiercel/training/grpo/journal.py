"""The groups of the newest step of a run with tools or an environment, whole as they were sampled.

Answers of tools cost time and may not come twice, so a run that is killed while it learns resumes from them. They are
used only if the run resumes at exactly that step, so that the policy is the one that sampled. Each rank keeps its own.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tiercel.regular_files import make_directory, remove
from tiercel.rollout.pending import PendingGroup, load_pending, save_pending
from tiercel.types import Group
from tiercel.writing import GO_ON, writing

FOLDER, STEP = "journal", re.compile(r"step-\d{6,}")


def keep_in_journal(run: Path, rank: int, step: int, groups: Sequence[Group], world_size: int | None = None) -> None:
    """Keep a rank's groups of a step, replacing those of an earlier step. With `world_size`, the first rank removes
    what ranks left that are no longer there."""
    folder = run / FOLDER
    place, temporary = folder / f"step-{step:06d}" / f"rank-{rank}", folder / f"rank-{rank}.tmp"
    with writing(place, GO_ON):
        make_directory(folder)
        remove(temporary)
        temporary.mkdir()
        save_pending(temporary, [PendingGroup.of(group) for group in groups])
        make_directory(place.parent)
        remove(place)
        temporary.rename(place)
        for left in folder.glob("step-*/rank-*"):
            if left == place or not STEP.fullmatch(left.parent.name) or left.parent.is_symlink():
                continue
            number = left.name.removeprefix("rank-")
            is_gone = rank == 0 and world_size is not None and number.isdigit() and int(number) >= world_size
            if number == str(rank) or is_gone:
                remove(left)
                with suppress(OSError):  # another rank's groups are there
                    left.parent.rmdir()


def journal_of(run: Path, step: int) -> dict[int, PendingGroup]:
    """Return the groups that all ranks kept of a step, by their prompt's global index. A group with a trajectory that
    failed is left out: what failed may be mended by now, so it is sampled again."""
    found: dict[int, PendingGroup] = {}
    for place in sorted((run / FOLDER).glob(f"step-{step:06d}/rank-*")):
        for index, group in load_pending(place).items():
            if all(completion.failure is None for completion in group.completions):
                found[index] = group
    return found
