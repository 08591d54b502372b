"""A small run directory to track, and the trackers that are opened for it."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.web.report.fake_runs import make_grounding
from tiercel.config import GrpoRecipe
from tiercel.errors import Terminated, TiercelError, TrainingError
from tiercel.log import printed
from tiercel.runs.directory import read_metrics
from tiercel.trackers.opening import open_trackers

STEPS = 4
PICTURES_AT = (2, 4)  # the evaluations with rollouts, among those at 0, 2 and 4
ERRORS = (None, Terminated("stopped after step 1"), TrainingError("the loss is nan"))  # of runs: done, stopped, failed


def grounding(path: Path) -> tuple[Path, list[dict[str, Any]]]:
    """A run of four steps, and its rows of metrics.jsonl: evaluations at 0, 2 and 4."""
    run = make_grounding(path, steps=STEPS, rows=8)
    return run, read_metrics(run)


def recipe_of(run: Path, names: Sequence[str], **changes: Any) -> GrpoRecipe:
    tree = {
        "model": {"path": "m"},
        "data": {"train": "rows.jsonl", "eval": "rows.jsonl"},
        "rewards": [{"name": "exact"}],
        "train": {"steps": STEPS, "eval_every": 2},
        "trackers": names,
        "output": str(run),
    }
    return GrpoRecipe.model_validate({**tree, **changes})


def track(
    run: Path,
    names: Sequence[str],
    rows: Sequence[dict],
    kept: Sequence[dict] = (),
    error: Exception | None = None,
    **changes: Any,
) -> list[str]:
    """Open the trackers of a run that resumes from `kept`, give them `rows`, and return what was reported. The run ends
    with `error`, if there is one."""
    said: list[str] = []
    recipe = recipe_of(run, names, **changes)
    with (
        printed(said.append),
        suppress(TiercelError),
        open_trackers(recipe.trackers, recipe, run, kept, STEPS) as trackers,
    ):
        for row in rows:
            trackers.row(row)
        if error is not None:
            raise error
    return said


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """A row without its step."""
    return {key: value for key, value in row.items() if key != "step"}
