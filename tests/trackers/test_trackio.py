"""trackio's local database, read back by sqlite3. Its directory is fixed when it is imported, so each run is a
process."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trackers.runs import PICTURES_AT, grounding, numbers
from tiercel.errors import EnvironmentProblem
from tiercel.trackers import wandb_like

pytest.importorskip("trackio")
ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from pathlib import Path
from tests.trackers.runs import track
from tiercel.runs.directory import read_metrics
run, kept, loss = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
rows = read_metrics(run)
told = rows[kept:] if loss == "own" else [{**row, "loss": float(loss)} for row in rows[kept:]]
assert track(run, ["trackio"], told, kept=rows[:kept]) == []
"""


def track_in_a_process(run: Path, kept: int, loss: str = "own", **variables: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRACKIO_")}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-c", PROGRAM, str(run), str(kept), loss]
    finished = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr


def tracked(database: Path) -> dict[str, tuple[dict[int, dict[str, float]], dict[int, dict[str, dict]]]]:
    """Metrics by step and pictures by step, by the id of the run; a step that comes twice is a failure."""
    with sqlite3.connect(database) as connection:
        lines = connection.execute("SELECT run_id, step, metrics FROM metrics ORDER BY id").fetchall()
    runs: dict[str, tuple[dict[int, dict[str, float]], dict[int, dict[str, dict]]]] = {}
    for run, step, text in lines:
        values = json.loads(text)
        found = runs.setdefault(run, ({}, {}))["rollouts/0" in values]
        assert step not in found, step
        found[step] = values
    return runs


def test_a_second_run_of_a_session_does_not_write_into_the_first_ones_file(monkeypatch):
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    monkeypatch.setattr(wandb_like, "_TRACKIO_DIRECTORIES", [])
    for own in ("runs/a", "runs/a"):
        wandb_like._set_trackio_directory(own)
        assert os.environ["TRACKIO_DIR"] == "runs/a"
    with pytest.raises(EnvironmentProblem):
        wandb_like._set_trackio_directory("runs/b")
    monkeypatch.setenv("TRACKIO_DIR", "mine")
    wandb_like._set_trackio_directory("runs/b")
    assert os.environ["TRACKIO_DIR"] == "mine"


def test_numbers_and_pictures_are_those_of_the_run_and_a_resumed_run_has_no_step_twice(tmp_path):
    run, rows = grounding(tmp_path / "study" / "run")
    track_in_a_process(run, kept=0, loss="99")
    track_in_a_process(run, kept=3)
    folder = run / "trackers/trackio"
    ((metrics, pictures),) = tracked(folder / "study.db").values()
    assert metrics == {row["step"]: numbers(row) for row in rows}
    assert sorted(pictures) == list(PICTURES_AT)
    picture = pictures[2]["rollouts/0"]
    assert picture["caption"].startswith("prompt: <image>Where is it?")
    assert (folder / "media" / picture["file_path"]).is_file()


@pytest.mark.catalogue
def test_a_shared_directory_keeps_another_run_of_the_same_name(tmp_path):
    shared = str(tmp_path / "shared")
    one, rows = grounding(tmp_path / "a" / "study" / "run")
    other, _ = grounding(tmp_path / "b" / "study" / "run")
    track_in_a_process(one, kept=0, TRACKIO_DIR=shared)
    track_in_a_process(other, kept=3, loss="99", TRACKIO_DIR=shared)  # only its id distinguishes it
    first, second = (metrics for metrics, _ in tracked(tmp_path / "shared/study.db").values())
    assert first == {row["step"]: numbers(row) for row in rows}
    assert {step: row.get("loss") for step, row in second.items()}[3] == 99.0
