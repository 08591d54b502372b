"""Weights & Biases offline: its run files, read back record by record."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.trackers.runs import ERRORS, PICTURES_AT, grounding, numbers, track

pytest.importorskip("wandb")
from wandb.proto import wandb_internal_pb2

BLOCK, FILE_HEADER, HEADER = 32768, 7, struct.Struct("<IHB")  # LevelDB's log: checksum, length, kind
WHOLE, FIRST, LAST = 1, 2, 4


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def records(file: Path) -> list[Any]:
    """Return the records once the last one is there, because wandb's own process writes them and may continue after
    `finish` has returned."""
    deadline = time.monotonic() + 200
    while True:
        found = list(written(file))
        if any(record.HasField("exit") for record in found):
            return found
        assert time.monotonic() < deadline, [record.WhichOneof("record_type") for record in found]
        time.sleep(0.05)


def written(file: Path) -> Iterator[Any]:
    data, at, parts = file.read_bytes(), FILE_HEADER, b""
    while at + HEADER.size <= len(data):
        left = BLOCK - at % BLOCK
        if left < HEADER.size:
            at += left
            continue
        _, length, kind = HEADER.unpack_from(data, at)
        part = data[at + HEADER.size : at + HEADER.size + length]
        if len(part) < length:  # still being written
            return
        at += HEADER.size + length
        parts = part if kind in (WHOLE, FIRST) else parts + part
        if kind in (WHOLE, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            yield record


def wait_for_the_next_second() -> None:
    """wandb names a directory by id and second, so two processes of a run are at least one apart."""
    time.sleep(1.01 - time.time() % 1)


def run_files(run: Path) -> list[Path]:
    return sorted((run / "trackers/wandb").glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime)


def history(file: Path) -> list[dict[str, Any]]:
    rows = [record.history for record in records(file) if record.HasField("history")]
    return [{".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row.item} for row in rows]


def metrics(file: Path) -> list[dict[str, Any]]:
    return [row for row in history(file) if "rollouts/0.path" not in row]


def own(row: dict[str, Any]) -> dict[str, float]:
    """Without wandb's own columns, and without the step."""
    return {key: value for key, value in row.items() if not key.startswith("_") and key != "step"}


def test_the_numbers_are_those_of_metrics_jsonl(tmp_path):
    run, rows = grounding(tmp_path / "study" / "run")
    assert track(run, ["wandb"], rows) == []
    (file,) = run_files(run)
    tracked = metrics(file)
    assert [row["step"] for row in tracked] == [0, 1, 2, 3, 4]
    assert [own(row) for row in tracked] == [numbers(row) for row in rows]
    (start,) = [record.run for record in records(file) if record.HasField("run")]
    assert (start.project, start.display_name) == ("study", "run")
    assert start.run_id == (run / "trackers/id").read_text()
    axes = {record.metric.glob_name or record.metric.name: record.metric.step_metric for record in records(file)}
    assert axes["*"] == "step"


def test_pictures_come_with_evaluations(tmp_path):
    run, rows = grounding(tmp_path / "run")
    assert track(run, ["wandb"], rows) == []
    (file,) = run_files(run)
    shown = [row for row in history(file) if "rollouts/0.path" in row]
    assert [row["step"] for row in shown] == list(PICTURES_AT)
    for number in range(4):
        assert shown[0][f"rollouts/{number}.caption"].startswith("prompt: <image>Where is it?")
        assert (file.parent / "files" / shown[0][f"rollouts/{number}.path"]).is_file()


def test_a_resumed_run_is_the_same_run_and_its_directory_whole(tmp_path):
    run, rows = grounding(tmp_path / "run")
    track(run, ["wandb"], [*rows[:3], *({**row, "loss": 99.0} for row in rows[3:])])
    wait_for_the_next_second()
    track(run, ["wandb"], rows[3:], kept=rows[:3])
    first, second = run_files(run)
    assert first.name == second.name  # run-ID.wandb
    assert [row["step"] for row in metrics(second)] == [0, 1, 2, 3, 4]
    assert [own(row) for row in metrics(second)] == [numbers(row) for row in rows]


@pytest.mark.parametrize(("error", "code"), tuple(zip(ERRORS, (0, 255, 1), strict=True)))
def test_wandb_learns_how_the_run_ended(tmp_path, error, code):
    run, rows = grounding(tmp_path / "run")
    assert track(run, ["wandb"], rows[:1], error=error) == []
    (file,) = run_files(run)
    assert [record.exit.exit_code for record in records(file) if record.HasField("exit")] == [code]


def test_a_run_that_starts_anew_is_another_run(tmp_path):
    run, rows = grounding(tmp_path / "run")
    track(run, ["wandb"], rows[:1])
    track(run, ["wandb"], rows[:1])
    first, second = run_files(run)
    assert first.name != second.name


def test_neither_secrets_nor_the_command_line_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "abcdefghijkl")
    run, rows = grounding(tmp_path / "run")
    track(run, ["wandb"], rows[:1], model={"path": "hub/abcdefghijkl"})
    (file,) = run_files(run)
    (config,) = [record.run.config for record in records(file) if record.HasField("run")]
    values = {item.key: json.loads(item.value_json) for item in config.update}
    assert values["model"]["path"] == "hub/[redacted MY_API_KEY]"
    for written in (path for path in (run / "trackers").rglob("*") if path.is_file()):
        assert b"abcdefghijkl" not in written.read_bytes(), written
    assert not list((run / "trackers").rglob("wandb-metadata.json"))
