"""MLflow in an SQLite file and on a real server, read back by its own client."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.forked import free_port
from tests.trackers.runs import ERRORS, PICTURES_AT, grounding, numbers, track
from tiercel.config.yaml_text import leaves
from tiercel.trackers.mlflow import OWNER, allowed


def test_names_are_those_of_the_row_where_mlflow_takes_them():
    assert allowed("reward/iou/mean") == "reward/iou/mean"
    assert allowed("reward/mine.py:a b-1/mean") == "reward/mine.py:a b-1/mean"
    assert allowed("reward/../h(x)/é/mean") == "reward/_/h_x_/_/mean"
    assert allowed("/a//b/.") == "_/a/_/b/_"


def test_the_recipes_keys_are_parameters():
    tree = {"optim": {"lr": 1e-5, "betas": [0.9, 0.999]}, "lora": None, "empty": {}}
    assert dict(leaves(tree)) == {"optim.lr": 1e-5, "optim.betas": [0.9, 0.999], "lora": None, "empty": {}}


@pytest.fixture
def no_settings(monkeypatch):
    pytest.importorskip("mlflow")
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)


def client_of(run: Path) -> Any:
    import mlflow

    return mlflow.MlflowClient(f"sqlite:///{run}/trackers/mlflow/mlflow.db")


def runs_of(client: Any, project: str) -> list[Any]:
    return client.search_runs([client.get_experiment_by_name(project).experiment_id])


def values_of(client: Any, run_id: str) -> dict[int, dict[str, list[float]]]:
    """Metrics by step, with every value that was logged for it."""
    rows: dict[int, dict[str, list[float]]] = {}
    for name in client.get_run(run_id).data.metrics:
        for metric in client.get_metric_history(run_id, name):
            rows.setdefault(metric.step, {}).setdefault(name, []).append(metric.value)
    return rows


def once(rows: list[dict]) -> dict[int, dict[str, list[float]]]:
    return {row["step"]: {name: [value] for name, value in numbers(row).items()} for row in rows}


def pictures_of(client: Any, run_id: str) -> list[str]:
    return sorted(file.path for file in client.list_artifacts(run_id, "images") if file.path.endswith(".png"))


def test_numbers_pictures_and_recipe_are_those_of_the_run(tmp_path, no_settings):
    run, rows = grounding(tmp_path / "study" / "run")
    assert track(run, ["mlflow"], rows, model={"path": "hub/model"}) == []
    client = client_of(run)
    (found,) = runs_of(client, "study")
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    assert values_of(client, found.info.run_id) == once(rows)
    assert found.data.params["optim.lr"] == "1e-05" and found.data.params["model.path"] == "hub/model"
    assert found.data.tags[OWNER] == (run / "trackers/id").read_text()
    assert not [name for name in found.data.tags if name.startswith("mlflow.source")]  # no command line
    assert len(pictures_of(client, found.info.run_id)) == 4 * len(PICTURES_AT)
    texts = client.list_artifacts(found.info.run_id, "rollouts/0")
    assert [Path(file.path).name for file in texts] == [f"step-{step:06d}.txt" for step in PICTURES_AT]
    caption = (run / "trackers/mlflow/artifacts" / found.info.run_id / "artifacts" / texts[0].path).read_text()
    assert caption.startswith("prompt: <image>Where is it?")


@pytest.mark.parametrize(("error", "status"), tuple(zip(ERRORS, ("FINISHED", "KILLED", "FAILED"), strict=True)))
def test_mlflow_learns_how_the_run_ended(tmp_path, no_settings, error, status):
    run, rows = grounding(tmp_path / "study" / "run")
    assert track(run, ["mlflow"], rows[:1], error=error) == []
    assert [found.info.status for found in runs_of(client_of(run), "study")] == [status]


def test_a_resumed_run_is_written_again_without_what_was_cut_off(tmp_path, no_settings):
    run, rows = grounding(tmp_path / "study" / "run")
    track(run, ["mlflow"], [*rows[:3], *({**row, "loss": 99.0} for row in rows[3:])])
    track(run, ["mlflow"], rows[3:], kept=rows[:3])
    client = client_of(run)
    (found,) = runs_of(client, "study")
    assert values_of(client, found.info.run_id) == once(rows)


@pytest.fixture
def server(tmp_path, monkeypatch, no_settings) -> Iterator[str]:
    """A real server on loopback, which the tracker is to write to."""
    uri = f"http://127.0.0.1:{free_port()}"
    words = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", uri.rpartition(":")[2]]
    words += ["--workers", "1", "--backend-store-uri", f"sqlite:///{tmp_path}/server.db"]
    words += ["--artifacts-destination", str(tmp_path / "stored")]
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(words, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not answers(f"{uri}/health"):
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "server.log").read_text()
            time.sleep(0.2)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        yield uri
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def test_a_run_on_a_server_goes_on_and_a_server_that_is_away_turns_it_off(tmp_path, server, monkeypatch):
    import mlflow

    run, rows = grounding(tmp_path / "study" / "run")
    assert track(run, ["mlflow"], rows[:3]) == []
    assert track(run, ["mlflow"], rows[3:], kept=rows[:3]) == []
    client = mlflow.MlflowClient(server)
    (found,) = runs_of(client, "study")
    assert values_of(client, found.info.run_id) == once(rows)
    assert len(pictures_of(client, found.info.run_id)) == 4 * len(PICTURES_AT)
    assert not (run / "trackers/mlflow/mlflow.db").exists()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    (line,) = track(run, ["mlflow"], rows[3:], kept=rows[:3])
    assert line.startswith("trackers: mlflow is off from here on: MlflowException: ")
