"""Ranks that compute each microbatch together make the updates of one process, and need less memory for it."""

import json
import os
import signal
import subprocess
import time

import pytest
from safetensors.torch import load_file

from tests.distributed.test_launch import ENVIRONMENT, command, final_hashes, launched, make_recipe, rank_process, run
from tests.distributed.test_strategies import nursery, run_ranks
from tests.forked import run_ranks as run_of_ranks
from tests.training.test_loops import write_rows

pytestmark = pytest.mark.scale
KL = {"coef": 0.1, "place": "reward", "estimator": "k1"}  # computed before the advantages, for each rank's own groups
COMPARED = {"loss", "grad_norm", "reward/mean", "entropy/mean", "eval/reward/mean", "tokens/shared_fraction", "kl/mean"}


@pytest.fixture(scope="module")
def shared(tiny_checkpoints, tmp_path_factory) -> list[str]:
    """Arguments of launches on rows with videos and pictures."""
    root = tmp_path_factory.mktemp("videos")
    rows = write_rows(root)
    lines = [json.loads(line) for line in rows.read_text().splitlines()]
    frames = [f"{number}-0.png" for number in (4, 1, 4, 7)]  # all of one size
    for line in lines[::2]:
        line["videos"] = [frames]
        line["messages"][0]["content"] = "<video>" + line["messages"][0]["content"]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["--checkpoints", str(tiny_checkpoints["qwen2_5_vl"].parent), "--rows", str(rows)]


@pytest.mark.parametrize("trained", ("adapter, videos", "adapter of the tower, videos"))
def test_gradients_of_rows_with_videos_are_those_of_one_process(trained, shared, tmp_path):
    alone = tmp_path / "alone.safetensors"
    run_ranks(1, "equal", "--strategy", "single", "--trained", trained, "--out", str(alone), *shared)
    right = load_file(alone)
    for strategy, count in (("context 2", 2), ("context 4", 4), ("context 2, fsdp2", 4)):
        out = tmp_path / "gradients.safetensors"
        run_ranks(count, "equal", "--strategy", strategy, "--trained", trained, "--out", str(out), *shared)
        found = load_file(out)
        errors = {name: float((found[name] - right[name]).norm() / right[name].norm()) for name in right}
        print(f"{strategy} x{count}, {trained}: worst relative error {max(errors.values()):.1e}")
        assert set(found) == set(right) and max(errors.values()) < 1e-5, errors


def test_a_killed_rank_costs_nothing_and_one_process_goes_on(tiny_checkpoints, tmp_path):
    together = ("--nproc", "2", "train.strategy=ddp", "train.context_parallel=2")
    for name in ("whole", "killed", "other"):
        changes = {"data": {"eval": str(tmp_path / "rows.jsonl"), "workers": 1}, "algorithm": {"kl": KL}}
        make_recipe(tiny_checkpoints, tmp_path, name, **changes)
    run(tmp_path / "whole.yaml", *together)
    process = subprocess.Popen(
        command(tmp_path / "killed.yaml", *together, "--max-restarts", "1"), env=ENVIRONMENT, stderr=subprocess.DEVNULL
    )
    metrics, deadline = tmp_path / "killed/metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 4):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(rank_process(process.pid, 1), signal.SIGKILL)
    assert process.wait(timeout=300) == 0
    assert final_hashes(tmp_path / "killed") == final_hashes(tmp_path / "whole")
    run(tmp_path / "other.yaml", *together, "train.steps=2")
    assert "going on from step 2" in run(tmp_path / "other.yaml")
    mine, right = (
        {row["step"]: row for row in map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())}
        for name in ("whole", "other")
    )
    assert list(mine) == list(right)
    for step, row in mine.items():
        assert set(row) <= set(right[step])  # the shorter run evaluated at its end too
        for key in COMPARED & set(row):
            assert row[key] == pytest.approx(right[step][key], rel=1e-3, abs=1e-4), (step, key)


@pytest.mark.parametrize("loss", ("sigmoid", "aot"))
def test_a_reference_computed_before_is_that_of_all_ranks(tiny_checkpoints, tmp_path, loss):
    rows = write_rows(tmp_path)
    records = [json.loads(line) for line in rows.read_text().splitlines()]
    rows.write_text("".join(json.dumps({**record, "rejected": "not that"}) + "\n" for record in records))
    losses = []
    for name, ranks in (("alone", 1), ("together", 2)):
        tree = {
            "model": {"path": str(tiny_checkpoints["qwen2_5_vl"]), "dtype": "float32"},
            "lora": {"rank": 4, "alpha": 8},
            "dpo": {"loss": loss, "precompute_reference": True},
            "data": {"train": str(rows), "workers": 0, "max_prompt_tokens": 200, "format": "tiercel"},
            "optim": {"lr": 1e-2, "prompts_per_step": 6},
            "train": {"steps": 2, "threads": 1, "strategy": "ddp", "context_parallel": ranks},
            "output": str(tmp_path / name),
        }
        (tmp_path / f"{name}.yaml").write_text(json.dumps(tree))
        words = ["dpo", str(tmp_path / f"{name}.yaml")]
        if ranks > 1:
            run_of_ranks(nursery(), ranks, "tiercel", words, timeout=300)
        else:
            done = nursery().run(words, timeout=300)
            assert done.returncode == 0, done.stderr
        metrics = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([row["loss"] for row in map(json.loads, metrics) if "loss" in row])
    assert len(losses[0]) == 2 and losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_ranks_that_are_no_whole_number_of_groups_are_refused(tiny_checkpoints, tmp_path):
    recipe = make_recipe(tiny_checkpoints, tmp_path, "run")
    said = launched(recipe, "train.context_parallel=2", code=2)
    assert "train.context_parallel: is 2, but must divide the number of ranks (1)" in said
