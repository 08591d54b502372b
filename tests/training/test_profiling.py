"""Traces of single steps."""

import gzip
import json

import pytest

from tests.training.test_loops import grpo_recipe, run_grpo, run_offline, sft_recipe, write_rows
from tiercel.errors import RecipeError
from tiercel.training.profiling import trace_file


def phases_of(file) -> set[str]:
    with gzip.open(file, "rt", encoding="utf-8") as trace:
        events = json.load(trace)["traceEvents"]
    return {event["name"] for event in events if event.get("cat") == "user_annotation"}


@pytest.mark.filterwarnings("ignore:Profiler clears events:UserWarning")
def test_a_step_that_is_asked_for_leaves_a_trace_with_its_phases(tiny_checkpoints, tmp_path):
    train = {"steps": 2, "profile": {"steps": [2]}}
    recipe = grpo_recipe(tiny_checkpoints["qwen2_vl"], write_rows(tmp_path), tmp_path / "run", train=train)
    run = run_grpo(recipe)
    assert [file.name for file in (run / "profiles").iterdir()] == ["step-000002-rank0.json.gz"]
    assert {"rollout", "reward", "learn", "sync"} <= phases_of(trace_file(run, 2, rank=0))
    assert f"step 2: profile in {run / 'profiles'}" in (run / "log.txt").read_text()


def test_an_sft_run_has_its_phase_and_a_run_that_asks_for_none_has_no_trace(tiny_checkpoints, tmp_path):
    rows = write_rows(tmp_path)
    for name, profile in (("with", {"steps": [1]}), ("without", None)):
        train = {"steps": 1, "profile": profile}
        run_offline(sft_recipe(tiny_checkpoints["qwen2_vl"], rows, tmp_path / name, train=train))
    assert "learn" in phases_of(trace_file(tmp_path / "with", 1, rank=0))
    assert not (tmp_path / "without" / "profiles").exists()
    again = {"steps": 2, "profile": {"steps": [2]}}  # a run may resume with other steps to record
    run_offline(sft_recipe(tiny_checkpoints["qwen2_vl"], rows, tmp_path / "without", train=again))
    assert trace_file(tmp_path / "without", 2, rank=0).exists()


def test_a_step_after_the_last_is_refused_where_epochs_decide_it(tiny_checkpoints, tmp_path):
    train = {"steps": None, "epochs": 1, "profile": {"steps": [3]}}  # 12 rows, 6 a step
    recipe = sft_recipe(tiny_checkpoints["qwen2_vl"], write_rows(tmp_path), tmp_path / "run", train=train)
    with pytest.raises(RecipeError, match="step 3, but the run has 2; name steps from 1 to 2"):
        run_offline(recipe)
