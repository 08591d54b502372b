"""The recipe's trackers: checked before the run starts, opened, given the run's rows, and closed at its end."""

import hashlib
import math
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tiercel.config.schema import BaseRecipe, TrackerName
from tiercel.errors import EXIT_TERMINATED, RunError
from tiercel.log import logger
from tiercel.regular_files import LARGEST_JSON, make_directory, read_text
from tiercel.reliability.redaction import redact_values
from tiercel.runs.files import write_atomically
from tiercel.runs.records import finite, groups_path
from tiercel.runs.step_files import stored
from tiercel.trackers.mlflow import Mlflow
from tiercel.trackers.pictures import rollout_pictures
from tiercel.trackers.tensorboard import TensorBoard
from tiercel.trackers.tracker import Ending, TrackedPicture, Tracker, TrackerPlace
from tiercel.trackers.wandb_like import open_swanlab, open_trackio, open_wandb

FOLDER = "trackers"  # in the run directory
MISSING = "missing-from.txt"  # in a tracker's directory while it is off: the step of the first row that it lacks
PATIENCE = 30.0  # seconds for one call; a tracker that takes longer would delay every step

# The names are also those of the trackers' packages.
TRACKERS: dict[TrackerName, Callable[[TrackerPlace], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": open_wandb,
    "trackio": open_trackio,
    "swanlab": open_swanlab,
    "mlflow": Mlflow,
}


class Trackers:
    """The trackers of a run that still work. A tracker that fails is turned off with a line in the log, and the run
    continues."""

    def __init__(self, run: Path, pictures_every: int, last_step: int):
        self._run = run
        self._pictures_every = pictures_every
        self._last_step = last_step
        self._working: dict[str, Tracker] = {}

    def open(self, name: TrackerName, place: TrackerPlace, kept: Sequence[Mapping[str, Any]]) -> None:
        """Open a tracker. `kept` are the rows of metrics.jsonl that the run resumes from; those that the tracker lacks
        are sent to it."""
        note = place.directory / MISSING
        first = _step_in(note, place.first_step) if place.directory.exists() else 0
        with self._attempt(name, first):
            make_directory(place.directory)
            self._working[name] = TRACKERS[name](place)
            first = 0 if self._working[name].needs_earlier else first
            note.unlink(missing_ok=True)
        for row in kept if name in self._working else ():
            if row["step"] >= first:
                self._send([name], row)

    def row(self, row: Mapping[str, Any]) -> None:
        """Send a row that is already in metrics.jsonl, at some steps with a few rollouts."""
        self._send(list(self._working), row)

    def close(self, ending: Ending) -> None:
        """Close the trackers that still work."""
        for name, tracker in list(self._working.items()):
            with self._attempt(name, self._last_step + 1):
                tracker.close(ending)
        self._working.clear()

    def _send(self, names: Sequence[str], row: Mapping[str, Any]) -> None:
        metrics = {key: value for key, value in row.items() if key != "step" and finite(value) is not None}
        pictures = self._pictures(row) if names else []
        for name in names:
            if (tracker := self._working.get(name)) is not None:
                with self._attempt(name, row["step"], PATIENCE):
                    tracker.row(row["step"], metrics, pictures)

    def _pictures(self, row: Mapping[str, Any]) -> list[TrackedPicture]:
        """Return pictures of the step's rollouts if they are due, which is at an evaluation, or at a checkpoint if
        there are none."""
        step = row["step"]
        is_due = step % self._pictures_every == 0 or step == self._last_step or any(k.startswith("eval/") for k in row)
        if not is_due or not stored(groups_path(self._run, "rollouts", step)).exists():
            return []
        try:
            return rollout_pictures(self._run, step)
        except (RunError, OSError) as error:
            logger.warning(f"trackers: no pictures of step {step}: {error}")
            return []

    @contextmanager
    def _attempt(self, name: str, step: int, patience: float = math.inf) -> Iterator[None]:
        """Turn a tracker off if it fails inside, so that it lacks the rows from `step` on, or takes longer than
        `patience` seconds."""
        started = time.monotonic()
        try:
            yield
        except Exception as error:  # of any type, because a tracker must never end the training
            reason = (str(error).strip().splitlines() or ["without a reason"])[0]
            self._turn_off(name, step, f"{type(error).__name__}: {reason}")
        else:
            if (seconds := time.monotonic() - started) > patience:
                self._turn_off(name, step + 1, f"a step's row took it {seconds:.0f} s")

    def _turn_off(self, name: str, step: int, reason: str) -> None:
        self._working.pop(name, None)
        with suppress(OSError):
            write_atomically(self._run / FOLDER / name / MISSING, str(step))
        logger.warning(
            f"trackers: {name} is off from here on: {reason}; the run continues, and metrics.jsonl has every row"
        )


@contextmanager
def open_trackers(
    names: Sequence[TrackerName],
    recipe: BaseRecipe,
    run: Path,
    kept: Sequence[Mapping[str, Any]],
    last_step: int,
) -> Iterator[Trackers]:
    """Open trackers for a run that resumes from the rows `kept` of metrics.jsonl, and tell them at the end how it
    ended. Logs why a tracker is turned off."""
    trackers = Trackers(run, recipe.train.eval_every or recipe.train.save_every, last_step)
    ending: Ending = "done"
    try:
        try:
            run_id = _run_id(run / FOLDER / "id", is_new=not kept) if names else ""
        except (OSError, RunError) as error:
            logger.warning(f"trackers: none are used: {error}")
            names = ()
        for name in names:
            trackers.open(name, place_of(recipe, run, name, run_id, kept), kept)
        yield trackers
    except BaseException as error:
        ending = _ending_of(error)
        raise
    finally:
        trackers.close(ending)


def place_of(
    recipe: BaseRecipe, run: Path, name: TrackerName, run_id: str, kept: Sequence[Mapping[str, Any]]
) -> TrackerPlace:
    """Return a tracker's place. The run is named after its directory, and the project after the parent directory."""
    path = run.absolute()
    return TrackerPlace(
        directory=path / FOLDER / name,
        project=_plain(path.parent.name),
        name=_plain(path.name, r"\w"),
        id=run_id,
        config=redact_values(recipe.model_dump(mode="json")),
        first_step=kept[-1]["step"] + 1 if kept else 0,
    )


def _ending_of(error: BaseException) -> Ending:
    if isinstance(error, KeyboardInterrupt | GeneratorExit):
        return "stopped"
    if getattr(error, "exit_code", None) != EXIT_TERMINATED:
        return "failed"
    return "done" if getattr(error, "is_by_caller", False) else "stopped"


def _step_in(file: Path, most: int) -> int:
    """Return the step that the note of a tracker has, at most `most`, which is also returned without a note."""
    try:
        return min(int(read_text(file, LARGEST_JSON)), most)
    except (OSError, ValueError):
        return most


def _run_id(file: Path, is_new: bool) -> str:
    """Return the run's id. It is stored in the run directory, so that the directory may be moved. A run that starts
    again from step 0 gets a new id."""
    make_directory(file.parent)
    if is_new or not file.exists() or file.is_symlink():
        write_atomically(file, uuid.uuid4().hex[:21])  # as long as SwanLab's own ids
    return read_text(file, LARGEST_JSON)


def _plain(name: str, letters: str = "A-Za-z0-9_") -> str:
    """Return the name with only the characters that every tracker accepts, which in a project are ASCII. A name that
    has none of them becomes its hash."""
    digest = hashlib.sha256(os.fsencode(name)).hexdigest()[:6]
    return re.sub(rf"[^{letters}.-]+", "-", name).strip("-.") or f"tiercel-{digest}"
