"""MLflow: an SQLite file in the run directory, or the server or database that MLFLOW_TRACKING_URI names."""

import os
import re
import time
from collections.abc import Mapping, Sequence

from tiercel.config.yaml_text import leaves
from tiercel.trackers.tracker import Ending, TrackedPicture, TrackerPlace

OWNER = "tiercel_run"  # a tag; MLflow itself chooses the ids of its runs
MOST_PARAMS = 100  # of a request, by MLflow's limit
STATUS: dict[Ending, str] = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
# A server that is away must not hold up a step. MLflow would try for minutes.
SETTINGS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}


class Mlflow:
    """An MLflow run. MLflow appends rows and replaces none, so a local run that resumes is written again from its first
    row, and a remote run is continued."""

    def __init__(self, place: TrackerPlace):
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        import mlflow.entities

        self._entities = mlflow.entities
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = mlflow.MlflowClient(uri or f"sqlite:///{place.directory}/mlflow.db")
        experiment = self._experiment(place, is_local=uri is None)
        earlier = []  # what earlier processes of this run recorded
        if place.first_step > 0:
            found = self._client.search_runs([experiment], f"tags.{OWNER} = '{place.id}'")
            earlier = [run.info.run_id for run in found]
        if uri is None:
            for run in earlier:
                self._client.delete_run(run)
        self.needs_earlier = uri is None or not earlier
        self._id = self._new_run(experiment, place) if self.needs_earlier else earlier[0]
        self._client.update_run(self._id, status="RUNNING")

    def row(self, step: int, metrics: Mapping[str, float], pictures: Sequence[TrackedPicture]) -> None:
        now = int(time.time() * 1000)
        found = [self._entities.Metric(allowed(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=found)
        for number, picture in enumerate(pictures):
            key = f"rollouts/{number}"
            self._client.log_image(self._id, picture.image, key=key, step=step, synchronous=True)
            self._client.log_text(self._id, picture.caption, f"{key}/step-{step:06d}.txt")

    def close(self, ending: Ending) -> None:
        self._client.set_terminated(self._id, STATUS[ending])

    def _experiment(self, place: TrackerPlace, is_local: bool) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", place.project)
        if (found := self._client.get_experiment_by_name(name)) is not None:
            return found.experiment_id
        return self._client.create_experiment(name, (place.directory / "artifacts").as_uri() if is_local else None)

    def _new_run(self, experiment: str, place: TrackerPlace) -> str:
        name = os.environ.get("MLFLOW_RUN_NAME", place.name)
        run = self._client.create_run(experiment, tags={OWNER: place.id}, run_name=name).info.run_id
        parameters = [self._entities.Param(allowed(key), str(value)) for key, value in leaves(place.config)]
        for first in range(0, len(parameters), MOST_PARAMS):
            self._client.log_batch(run, params=parameters[first : first + MOST_PARAMS])
        return run


def allowed(name: str) -> str:
    """Return a name with only what MLflow accepts: other characters become underscores, and so does a part that a path
    would not keep."""
    parts = re.sub(r"[^\w\-. :/]", "_", name, flags=re.ASCII).split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)
