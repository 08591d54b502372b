"""trackio: an SQLite file, or a Space or server if trackio's variables name one."""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tiercel.trackers.tracker import OfPackage, TrackerPlace

OWNER = "tiercel_run"  # key of trackio's config that distinguishes this run from another one of the same name


class Trackio(OfPackage):
    """A trackio run. trackio appends rows and replaces none, so a local run that resumes is written again from its
    first row, and a remote run is continued."""

    def __init__(self, place: TrackerPlace):
        os.environ.setdefault("TRACKIO_DIR", str(place.directory))  # read when trackio is imported
        import trackio

        self._image = trackio.Image
        is_remote = any(os.environ.get(name) for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"))
        self.needs_earlier = not is_remote
        if not is_remote and place.first_step > 0:
            _delete(trackio.Api, place)
        self._run = trackio.init(
            project=place.project,
            name=place.name,
            config={**place.config, OWNER: place.id},
            resume="allow" if is_remote and place.first_step > 0 else "never",
            embed=False,
        )


def _delete(api: Callable[[], Any], place: TrackerPlace) -> None:
    """Delete what an earlier process of this run recorded."""
    with suppress(ValueError):  # the project does not exist, because TRACKIO_DIR has changed
        for run in api().runs(place.project):
            if run.name == place.name and (run.config or {}).get(OWNER) == place.id:
                run.delete()
