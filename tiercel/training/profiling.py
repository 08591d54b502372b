"""Traces of single steps, for Perfetto or Chrome."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from tiercel.config.schema import Profile
from tiercel.distributed.ranks import Ranks
from tiercel.errors import RecipeError
from tiercel.log import logger
from tiercel.regular_files import make_directory, remove
from tiercel.runs.directory import RunDirectory
from tiercel.writing import GO_ON, writing


def trace_file(run: Path, step: int, rank: int) -> Path:
    """Return the path of a rank's trace of the step that ends with this many updates."""
    return run / "profiles" / f"step-{step:06d}-rank{rank}.json.gz"


def require_steps_to_profile(asked: Profile | None, last: int) -> None:
    """Raise RecipeError if a step to record lies after the run's last, which epochs may decide."""
    if asked is not None and max(asked.steps) > last:
        raise RecipeError(
            [f"train.profile.steps: got step {max(asked.steps)}, but the run has {last}; name steps from 1 to {last}"]
        )


@contextmanager
def profiled(asked: Profile | None, run: RunDirectory, step: int) -> Iterator[None]:
    """Record what happens inside if the recipe asks for this step, and write this rank's trace. A step that fails
    leaves none."""
    if asked is None or step not in asked.steps:
        yield
        return
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recorded:
        yield
    _write(recorded, trace_file(run.path, step, run.ranks.rank), run.ranks)
    logger.info(f"step {step}: profile in {run.path / 'profiles'}; open it with https://ui.perfetto.dev")


def _write(recorded: profile, file: Path, ranks: Ranks) -> None:
    def write() -> None:
        with writing(file, GO_ON):
            make_directory(file.parent)
            remove(file)  # a link would be followed
            recorded.export_chrome_trace(str(file))

    ranks.run_on_all(write)
