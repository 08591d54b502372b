"""Weights & Biases, trackio and SwanLab: packages whose runs take dictionaries of numbers and of their own pictures."""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tiercel.errors import EnvironmentProblem
from tiercel.trackers.tracker import Ending, TrackedPicture, TrackerPlace

STEP = "step"  # the axis of wandb's charts: its own counter never goes back, but the steps of a resumed run do
# wandb reads these when it is first used. log.txt has the console's lines, and env.json the versions.
QUIET = {"WANDB_CONSOLE": "off", "WANDB_DISABLE_GIT": "true", "WANDB_FINISH_TIMEOUT": "300"}
OWNER = "tiercel_run"  # key of trackio's config that distinguishes this run from another one of the same name
WANDB_CODES: dict[Ending, int] = {"done": 0, "stopped": 255, "failed": 1}  # wandb's own code of a Ctrl-C is 255
SWANLAB_STATES: dict[Ending, Any] = {"done": "success", "stopped": "aborted", "failed": "crashed"}


@dataclass(frozen=True, kw_only=True, slots=True)
class WandbLike:
    """A run of one of these packages."""

    needs_earlier: bool
    log: Callable[..., Any]  # takes values by their keys, and `step`
    image: Callable[..., Any]  # the package's type of picture
    close: Callable[[Ending], Any]

    def row(self, step: int, metrics: Mapping[str, float], pictures: Sequence[TrackedPicture]) -> None:
        """Log each picture under its own key, because trackers would show a list at the size of its first picture."""
        self.log(dict(metrics), step=step)
        if pictures:
            shown = (self.image(picture.image, caption=picture.caption) for picture in pictures)
            self.log({f"rollouts/{number}": picture for number, picture in enumerate(shown)}, step=step)


def open_wandb(place: TrackerPlace) -> WandbLike:
    """Open a wandb run: online if the user is logged in; with WANDB_MODE=offline, a directory to synchronise later. A
    run with the same id is continued. Offline, each process writes its own directory, and synchronising a later one
    replaces the earlier one, so each must contain all rows. A run that the script has opened is used and left open."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    import wandb

    if (own := wandb.run) is not None:
        own.config.update(dict(place.config), allow_val_change=True)
    run = own or wandb.init(
        project=_variable("WANDB_PROJECT") or place.project,
        name=_variable("WANDB_NAME") or place.name,
        id=_variable("WANDB_RUN_ID") or place.id,
        dir=_variable("WANDB_DIR") or str(place.directory),
        config=dict(place.config),
        resume="allow",
        # wandb's data about the process would include the command line, which may contain a secret.
        settings=wandb.Settings(x_disable_meta=True),
    )
    run.define_metric(STEP, hidden=True)
    if own is None:
        run.define_metric("*", step_metric=STEP)
    defined = set[str]()  # of a run of the script, whose own metrics keep their axis

    def log(values: dict[str, Any], step: int) -> None:
        for name in values.keys() - defined if own is not None else ():
            run.define_metric(name, step_metric=STEP)
            defined.add(name)
        run.log({STEP: step, **values})

    if own is not None:
        close, needs_earlier = (lambda ending: None), run.offline and own.step == 0
        return WandbLike(log=log, image=wandb.Image, close=close, needs_earlier=needs_earlier)

    def finish(ending: Ending) -> None:
        run.finish(exit_code=WANDB_CODES[ending])

    return WandbLike(log=log, image=wandb.Image, close=finish, needs_earlier=run.offline)


def open_swanlab(place: TrackerPlace) -> WandbLike:
    """Open a SwanLab run: online if the user is logged in; with SWANLAB_MODE=offline, a directory to synchronise later.
    A run with the same id is continued. If a step is sent twice, the service keeps the first value. Offline, each
    process writes its own directory, which must contain all rows."""
    import swanlab

    handler = signal.getsignal(signal.SIGINT)
    run = swanlab.init(
        project=_variable("SWANLAB_PROJ_NAME", "SWANLAB_PROJECT_NAME") or place.project,
        name=_variable("SWANLAB_EXP_NAME", "SWANLAB_EXPERIMENT_NAME") or place.name,
        id=_variable("SWANLAB_RUN_ID") or place.id,
        log_dir=_variable("SWANLAB_LOGDIR", "SWANLAB_LOG_DIR") or str(place.directory),
        config=dict(place.config),
        resume="allow",
        # log.txt has the console's lines. SwanLab's data about the process would include the command line, which may
        # contain a secret.
        settings=swanlab.Settings(
            probe={"runtime": False, "git": False, "requirements": False}, terminal={"proxy_type": "none"}
        ),
    )
    signal.signal(signal.SIGINT, handler)  # SwanLab replaces the handler, and Ctrl-C would no longer save the run

    def finish(ending: Ending) -> None:
        run.finish(SWANLAB_STATES[ending], None if ending == "done" else f"{ending}; log.txt of the run says more")

    return WandbLike(log=run.log, image=swanlab.Image, close=finish, needs_earlier=run.mode != "online")


_TRACKIO_DIRECTORIES: list[str] = []  # that this process chose


def _set_trackio_directory(own: str) -> None:
    """Choose the directory of trackio's file unless the user has. trackio reads the variable once, when it is imported.
    Raises EnvironmentProblem if an earlier run of this process has chosen another directory."""
    if os.environ.get("TRACKIO_DIR") not in (None, *_TRACKIO_DIRECTORIES):
        return
    if _TRACKIO_DIRECTORIES and own not in _TRACKIO_DIRECTORIES:
        raise EnvironmentProblem(
            f"trackio still writes into {_TRACKIO_DIRECTORIES[0]}, the directory of an earlier run of this process; "
            "restart the session, or set TRACKIO_DIR to one directory for all runs before the first"
        )
    os.environ["TRACKIO_DIR"] = own
    _TRACKIO_DIRECTORIES.append(own)


def open_trackio(place: TrackerPlace) -> WandbLike:
    """Open a trackio run: an SQLite file, or a Space or server if trackio's variables name one. trackio appends rows
    and replaces none, so a local run that resumes is written again from its first row, and a remote run is
    continued."""
    _set_trackio_directory(str(place.directory))
    import trackio

    is_remote, is_resumed = _variable("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL") is not None, place.first_step > 0
    if is_resumed and not is_remote:
        _delete(trackio.Api, place)
    run = trackio.init(
        project=place.project,
        name=place.name,
        config={**place.config, OWNER: place.id},
        resume="allow" if is_resumed and is_remote else "never",
        embed=False,
    )

    def finish(ending: Ending) -> None:  # trackio's runs have no state
        run.finish()

    return WandbLike(log=run.log, image=trackio.Image, close=finish, needs_earlier=not is_remote)


def _variable(*names: str) -> str | None:
    """Return the first of these variables of the environment that is set."""
    return next((value for name in names if (value := os.environ.get(name))), None)


def _delete(api: Callable[[], Any], place: TrackerPlace) -> None:
    """Delete what an earlier process of this run recorded."""
    with suppress(ValueError):  # the project does not exist, because TRACKIO_DIR has changed
        for run in api().runs(place.project):
            if run.name == place.name and (run.config or {}).get(OWNER) == place.id:
                run.delete()
