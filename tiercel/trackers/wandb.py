"""Weights & Biases: online where it is logged in, a directory to sync later with WANDB_MODE=offline."""

import os
from collections.abc import Mapping, Sequence

from tiercel.trackers.tracker import Picture, Place

STEP = "step"  # the charts' axis; wandb's own counter never goes back, and a resumed run does
# Read by wandb when it is first used. The console has its log.txt, and git says nothing that env.json does not.
QUIET = {"WANDB_CONSOLE": "off", "WANDB_DISABLE_GIT": "true", "WANDB_FINISH_TIMEOUT": "300"}


class Wandb:
    """A run of the same id goes on. Offline each process writes a directory of its own, and syncing the later one
    replaces the earlier, so that each has to be whole."""

    def __init__(self, place: Place):
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", place.project),
            name=os.environ.get("WANDB_NAME", place.name),
            id=os.environ.get("WANDB_RUN_ID", place.id),
            dir=os.environ.get("WANDB_DIR", str(place.directory)),
            config=dict(place.config),
            resume="allow",
            # What it finds out about the process holds the command line, and that may hold a secret.
            settings=wandb.Settings(x_disable_meta=True),
        )
        self._run.define_metric(STEP, hidden=True)
        self._run.define_metric("*", step_metric=STEP)
        self.needs_earlier = self._run.offline

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({STEP: step, **metrics})

    def images(self, step: int, pictures: Sequence[Picture]) -> None:
        # Each under a key of its own: a list would be shown at the size of its first.
        shown = {
            f"rollouts/{number}": self._wandb.Image(picture.image, caption=picture.caption)
            for number, picture in enumerate(pictures)
        }
        self._run.log({STEP: step, **shown})

    def close(self) -> None:
        self._run.finish()
