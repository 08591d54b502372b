"""Weights & Biases, trackio and SwanLab: packages whose runs take dictionaries of numbers and of their own pictures."""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tiercel.trackers.tracker import TrackedPicture, TrackerPlace

STEP = "step"  # the axis of wandb's charts: its own counter never goes back, but the steps of a resumed run do
# wandb reads these when it is first used. log.txt has the console's lines, and env.json the versions.
QUIET = {"WANDB_CONSOLE": "off", "WANDB_DISABLE_GIT": "true", "WANDB_FINISH_TIMEOUT": "300"}
OWNER = "tiercel_run"  # key of trackio's config that distinguishes this run from another one of the same name


class WandbLike:
    """A run of one of these packages. `_open` of a subclass makes it."""

    def __init__(self, place: TrackerPlace):
        self._run, self._image, self.needs_earlier = self._open(place)

    def _open(self, place: TrackerPlace) -> tuple[Any, Callable[..., Any], bool]:
        """Return the run, the package's type of picture, and `needs_earlier`."""
        raise NotImplementedError

    def row(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log(step, dict(metrics))

    def images(self, step: int, pictures: Sequence[TrackedPicture]) -> None:
        """Log each picture under its own key, because trackers would show a list at the size of its first picture."""
        shown = (self._image(picture.image, caption=picture.caption) for picture in pictures)
        self._log(step, {f"rollouts/{number}": picture for number, picture in enumerate(shown)})

    def close(self) -> None:
        self._run.finish()

    def _log(self, step: int, values: dict[str, Any]) -> None:
        self._run.log(values, step=step)


class Wandb(WandbLike):
    """A wandb run: online if the user is logged in; with WANDB_MODE=offline, a directory to synchronise later. A run
    with the same id is continued. Offline, each process writes its own directory, and synchronising a later one
    replaces the earlier one, so each must contain all rows."""

    def _open(self, place: TrackerPlace) -> tuple[Any, Callable[..., Any], bool]:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        import wandb

        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", place.project),
            name=os.environ.get("WANDB_NAME", place.name),
            id=os.environ.get("WANDB_RUN_ID", place.id),
            dir=os.environ.get("WANDB_DIR", str(place.directory)),
            config=dict(place.config),
            resume="allow",
            # wandb's data about the process would include the command line, which may contain a secret.
            settings=wandb.Settings(x_disable_meta=True),
        )
        run.define_metric(STEP, hidden=True)
        run.define_metric("*", step_metric=STEP)
        return run, wandb.Image, run.offline

    def _log(self, step: int, values: dict[str, Any]) -> None:
        self._run.log({STEP: step, **values})


class SwanLab(WandbLike):
    """A SwanLab run: online if the user is logged in; with SWANLAB_MODE=offline, a directory to synchronise later. A
    run with the same id is continued. If a step is sent twice, the service keeps the first value. Offline, each process
    writes its own directory, which must contain all rows."""

    def _open(self, place: TrackerPlace) -> tuple[Any, Callable[..., Any], bool]:
        import swanlab

        has_project = any(name in os.environ for name in ("SWANLAB_PROJ_NAME", "SWANLAB_PROJECT_NAME"))
        has_name = any(name in os.environ for name in ("SWANLAB_EXP_NAME", "SWANLAB_EXPERIMENT_NAME"))
        handler = signal.getsignal(signal.SIGINT)
        run = swanlab.init(
            project=None if has_project else place.project,
            name=None if has_name else place.name,
            id=os.environ.get("SWANLAB_RUN_ID", place.id),
            log_dir=os.environ.get("SWANLAB_LOGDIR") or os.environ.get("SWANLAB_LOG_DIR") or str(place.directory),
            config=dict(place.config),
            resume="allow",
            # log.txt has the console's lines. SwanLab's data about the process would include the command line, which
            # may contain a secret.
            settings=swanlab.Settings(
                probe={"runtime": False, "git": False, "requirements": False}, terminal={"proxy_type": "none"}
            ),
        )
        signal.signal(signal.SIGINT, handler)  # SwanLab replaces the handler, and Ctrl-C would no longer save the run
        return run, swanlab.Image, run.mode != "online"


class Trackio(WandbLike):
    """A trackio run: an SQLite file, or a Space or server if trackio's variables name one. trackio appends rows and
    replaces none, so a local run that resumes is written again from its first row, and a remote run is continued."""

    def _open(self, place: TrackerPlace) -> tuple[Any, Callable[..., Any], bool]:
        os.environ.setdefault("TRACKIO_DIR", str(place.directory))  # read when trackio is imported
        import trackio

        is_remote = any(os.environ.get(name) for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"))
        if not is_remote and place.first_step > 0:
            _delete(trackio.Api, place)
        run = trackio.init(
            project=place.project,
            name=place.name,
            config={**place.config, OWNER: place.id},
            resume="allow" if is_remote and place.first_step > 0 else "never",
            embed=False,
        )
        return run, trackio.Image, not is_remote


def _delete(api: Callable[[], Any], place: TrackerPlace) -> None:
    """Delete what an earlier process of this run recorded."""
    with suppress(ValueError):  # the project does not exist, because TRACKIO_DIR has changed
        for run in api().runs(place.project):
            if run.name == place.name and (run.config or {}).get(OWNER) == place.id:
                run.delete()
