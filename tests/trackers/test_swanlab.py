"""SwanLab offline: its run files, read back by its own reader."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.trackers.runs import ERRORS, PICTURES_AT, grounding, numbers, track

pytest.importorskip("swanlab")
from swanlab.proto.swanlab.record.v1.record_pb2 import Record
from swanlab.proto.swanlab.run.v1.run_pb2 import RunState
from swanlab.sdk.internal.core_python.store import DataStoreReader


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("SWANLAB_MODE", "offline")


def run_files(run: Path) -> list[Path]:
    return sorted((run / "trackers/swanlab").glob("run-*/*.swanlab"), key=lambda file: file.stat().st_mtime_ns)


def records(file: Path) -> list[Any]:
    reader, found = DataStoreReader(), []
    reader.open(str(file))
    while (data := reader.scan()) is not None:
        record = Record()
        record.ParseFromString(data)
        found.append(record)
    return found


def metrics(file: Path) -> dict[int, dict[str, float]]:
    """By step; a step that a metric has twice is a failure."""
    rows: dict[int, dict[str, float]] = {}
    for scalar in (record.scalar for record in records(file) if record.HasField("scalar")):
        row = rows.setdefault(scalar.step, {})
        assert scalar.key not in row, (scalar.key, scalar.step)
        row[scalar.key] = scalar.value.number
    return rows


def test_the_numbers_are_those_of_metrics_jsonl(tmp_path):
    run, rows = grounding(tmp_path / "study" / "run")
    assert track(run, ["swanlab"], rows) == []
    (file,) = run_files(run)
    assert metrics(file) == {row["step"]: numbers(row) for row in rows}
    (start,) = [record.start for record in records(file) if record.HasField("start")]
    assert (start.project, start.name, start.id) == ("study", "run", (run / "trackers/id").read_text())


def test_pictures_come_with_evaluations(tmp_path):
    run, rows = grounding(tmp_path / "run")
    track(run, ["swanlab"], rows)
    (file,) = run_files(run)
    shown = [record.media for record in records(file) if record.HasField("media")]
    assert [(media.key, media.step) for media in shown] == [
        (f"rollouts/{number}", step) for step in PICTURES_AT for number in range(4)
    ]
    (item,) = shown[0].value.items
    assert item.caption.startswith("prompt: <image>Where is it?")
    assert (file.parent / "media/image" / item.filename).is_file()


def test_a_resumed_run_is_the_same_run_and_its_directory_whole(tmp_path):
    run, rows = grounding(tmp_path / "run")
    track(run, ["swanlab"], [*rows[:3], *({**row, "loss": 99.0} for row in rows[3:])])
    track(run, ["swanlab"], rows[3:], kept=rows[:3])
    first, second = run_files(run)
    assert first.name == second.name  # run-ID.swanlab
    assert metrics(second) == {row["step"]: numbers(row) for row in rows}


@pytest.mark.parametrize(("error", "state"), tuple(zip(ERRORS, ("FINISHED", "ABORTED", "CRASHED"), strict=True)))
def test_swanlab_learns_how_the_run_ended(tmp_path, error, state):
    run, rows = grounding(tmp_path / "run")
    assert track(run, ["swanlab"], rows[:1], error=error) == []
    (file,) = run_files(run)
    (end,) = [record.finish for record in records(file) if record.HasField("finish")]
    assert RunState.Name(end.state) == f"RUN_STATE_{state}"


def test_the_runs_own_signal_handler_stays(tmp_path):
    """SwanLab takes SIGINT while its run is open; the run's handler saves a checkpoint first."""
    handlers = []

    class Row(dict):
        def items(self):
            handlers.append(signal.getsignal(signal.SIGINT))
            return super().items()

    run, rows = grounding(tmp_path / "run")
    own = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        mine = signal.getsignal(signal.SIGINT)
        track(run, ["swanlab"], [Row(rows[0])])
        assert handlers == [mine] and signal.getsignal(signal.SIGINT) == mine
    finally:
        signal.signal(signal.SIGINT, own)
