"""Whole runs with trackers: they have what metrics.jsonl has, also after a resume."""

import shutil

import pytest

from tests.training.test_loops import grpo_recipe, run_grpo, run_offline, sft_recipe, write_rows
from tiercel.cli.main import main
from tiercel.config import recipe_to_yaml, tracker_packages
from tiercel.runs.directory import read_metrics
from tiercel.trackers import opening
from tiercel.training import session
from tiercel.training.offline import loop as offline


def close_to(rows):
    return {row["step"]: pytest.approx({k: v for k, v in row.items() if k != "step"}, rel=1e-6) for row in rows}


def test_a_run_that_goes_on_has_every_step_once(tiny_checkpoints, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    from tests.trackers import test_tensorboard, test_wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    rows, output, trackers = write_rows(tmp_path), tmp_path / "study" / "run", ["tensorboard", "wandb"]

    def recipe(**changes):
        train = {"save_every": 2, "eval_every": 2, **changes}
        return grpo_recipe(tiny_checkpoints["qwen2_5_vl"], rows, output, train=train, trackers=trackers)

    run = run_grpo(recipe(steps=3))
    shutil.rmtree(run / "checkpoints/step-000003")  # as if it was killed after the row of step 3
    test_wandb.wait_for_the_next_second()
    run_grpo(recipe(steps=4))
    assert "is off from here on" not in (run / "log.txt").read_text()
    recorded = read_metrics(run)
    assert [row["step"] for row in recorded] == [0, 1, 2, 3, 4]
    events = test_tensorboard.accumulated(run)
    assert test_tensorboard.rows_of(events) == close_to(recorded)
    assert [event.step for event in events.Images("rollouts/0")] == [2, 4]
    before, after = test_wandb.run_files(run)
    assert before.name == after.name
    assert [row["step"] for row in test_wandb.metrics(before)] == [0, 1, 2, 3]
    assert [row["step"] for row in test_wandb.metrics(after)] == [0, 1, 2, 3, 4]
    assert {row["step"]: test_wandb.own(row) for row in test_wandb.metrics(after)} == close_to(recorded)


class Recorder:
    """Stands in for a tracker."""

    needs_earlier = False
    calls: list

    def __init__(self, place):
        self.calls.append("open")

    def row(self, step, metrics, pictures):
        self.calls.append(step)
        if step == self.breaks_at:
            raise ConnectionError("network gone")

    def close(self, ending):
        self.calls.append(ending)


@pytest.fixture
def recorder(monkeypatch):
    stand_in = type("StandIn", (Recorder,), {"calls": [], "breaks_at": None})
    monkeypatch.setitem(opening.TRACKERS, "wandb", stand_in)
    monkeypatch.setattr(session, "require_packages", lambda names: None)
    return stand_in


def test_a_tracker_that_fails_costs_no_row(tiny_checkpoints, tmp_path, recorder):
    recorder.breaks_at = 1
    recipe = sft_recipe(tiny_checkpoints["qwen2_vl"], write_rows(tmp_path), tmp_path / "run", trackers=["wandb"])
    run = run_offline(recipe)
    assert [row["step"] for row in read_metrics(run)] == [0, 1, 2, 3]
    assert recorder.calls == ["open", 0, 1]
    log = (run / "log.txt").read_text()
    assert log.count("trackers: wandb is off from here on: ConnectionError: network gone; the run continues") == 1


def test_trackers_are_closed_when_training_fails_and_may_change_when_it_goes_on(
    tiny_checkpoints, tmp_path, recorder, monkeypatch
):
    recipe = sft_recipe(tiny_checkpoints["qwen2_vl"], write_rows(tmp_path), tmp_path / "run", trackers=["wandb"])
    honest, calls = offline.example_update, iter(range(10))

    def failing(engine, objective, plan):
        if next(calls) == 2:
            raise ValueError("my own mistake")
        return honest(engine, objective, plan)

    monkeypatch.setattr(offline, "example_update", failing)
    with pytest.raises(ValueError, match="my own mistake"):
        run_offline(recipe)
    assert recorder.calls == ["open", 0, 1, 2, "failed"]
    run = run_offline(recipe.model_copy(update={"trackers": ()}))  # resumed from step 2
    assert [row["step"] for row in read_metrics(run)] == [0, 1, 2, 3]
    assert recorder.calls[-1] == "failed"
    run_offline(recipe)  # nothing is left to do, so nothing is opened
    assert recorder.calls == ["open", 0, 1, 2, "failed"]


@pytest.mark.parametrize("command", ("check", "sft"))
def test_a_missing_package_is_told_before_the_model_is_looked_for(tmp_path, monkeypatch, capsys, command):
    honest = tracker_packages.find_spec
    monkeypatch.setattr(tracker_packages, "find_spec", lambda name: None if name == "swanlab" else honest(name))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    recipe = sft_recipe(tmp_path / "model", write_rows(tmp_path), tmp_path / "run", trackers=["swanlab"])
    (tmp_path / "recipe.yaml").write_text(recipe_to_yaml(recipe))
    assert main([command, str(tmp_path / "recipe.yaml")]) == 2
    said, error = capsys.readouterr()
    told = "trackers: swanlab is not installed; run pip install swanlab, or remove it from trackers"
    assert told in (said if command == "check" else error)  # `check` continues, here to a model that does not exist
    assert not (tmp_path / "run").exists()
