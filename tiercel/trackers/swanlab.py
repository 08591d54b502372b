"""SwanLab: online if the user is logged in; with SWANLAB_MODE=offline, a directory to synchronise later."""

import os
import signal

from tiercel.trackers.tracker import OfPackage, TrackerPlace


class SwanLab(OfPackage):
    """A SwanLab run. A run with the same id is continued. If a step is sent twice, the service keeps the first value.
    Offline, each process writes its own directory, which must contain all rows."""

    def __init__(self, place: TrackerPlace):
        import swanlab

        self._image = swanlab.Image
        has_project = any(name in os.environ for name in ("SWANLAB_PROJ_NAME", "SWANLAB_PROJECT_NAME"))
        has_name = any(name in os.environ for name in ("SWANLAB_EXP_NAME", "SWANLAB_EXPERIMENT_NAME"))
        handler = signal.getsignal(signal.SIGINT)
        self._run = swanlab.init(
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
        self.needs_earlier = self._run.mode != "online"
