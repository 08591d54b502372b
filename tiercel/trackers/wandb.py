"""Weights & Biases: online if the user is logged in; with WANDB_MODE=offline, a directory to synchronise later."""

import os
from collections.abc import Mapping, Sequence

from tiercel.trackers.tracker import OfPackage, TrackedPicture, TrackerPlace, by_key

STEP = "step"  # the axis of the charts: wandb's own counter never goes back, but the steps of a resumed run do
# wandb reads these when it is first used. log.txt has the console's lines, and env.json the versions.
QUIET = {"WANDB_CONSOLE": "off", "WANDB_DISABLE_GIT": "true", "WANDB_FINISH_TIMEOUT": "300"}


class Wandb(OfPackage):
    """A wandb run. A run with the same id is continued. Offline, each process writes its own directory, and
    synchronising a later one replaces the earlier one, so each must contain all rows."""

    def __init__(self, place: TrackerPlace):
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        import wandb

        self._image = wandb.Image
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", place.project),
            name=os.environ.get("WANDB_NAME", place.name),
            id=os.environ.get("WANDB_RUN_ID", place.id),
            dir=os.environ.get("WANDB_DIR", str(place.directory)),
            config=dict(place.config),
            resume="allow",
            # wandb's data about the process would include the command line, which may contain a secret.
            settings=wandb.Settings(x_disable_meta=True),
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        self.needs_earlier = self._run.offline

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({STEP: step, **metrics})

    def images(self, step: int, pictures: Sequence[TrackedPicture]) -> None:
        self._run.log({STEP: step, **by_key(pictures, self._image)})
