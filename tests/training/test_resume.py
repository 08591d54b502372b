"""A run that is killed at any moment and run again ends with the same bytes as one that was not."""

import hashlib
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pytest
import torch
from safetensors.torch import load_file

from tests.forked import Command, commands
from tests.training.test_loops import grpo_recipe, run_grpo, run_offline, sft_recipe, write_rows
from tiercel.config import GrpoRecipe, recipe_to_yaml
from tiercel.runs.directory import read_metrics

KILLS = 4
STEPS = 6


def final_hashes(run: Path) -> dict[str, str]:
    """sha256 of the trained files of the last checkpoint."""
    last = run / f"checkpoints/step-{STEPS:06d}"
    files = [p for p in sorted(last.rglob("*")) if p.suffix == ".safetensors"]
    return {p.relative_to(last).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def start(kind: str, recipe: Path) -> Command:
    """Start a run in a process that has all imports done. What it says is added to a file beside the recipe."""
    with log_of(recipe).open("ab") as file:
        return commands().start([kind, str(recipe)], file)


def log_of(recipe: Path) -> Path:
    return recipe.with_suffix(".log")


def wait_for_steps(process: Command, run: Path, count: int) -> None:
    """Wait until the metrics have this many steps, or the process has ended."""
    metrics = run / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) >= count):
        time.sleep(0.02)


def write_recipe(path: Path, recipe) -> Path:
    path.write_text(recipe_to_yaml(recipe))
    return path


def require_same_bytes_after_kills(make_recipe: Callable[[Path], GrpoRecipe], directory: Path) -> None:
    """Run the recipe of an output folder as a whole, and killed after its first and its fourth step."""
    whole, killed = (
        write_recipe(directory / f"{name}.yaml", make_recipe(directory / name)) for name in ("whole", "killed")
    )
    process = start("grpo", whole)
    assert process.wait(timeout=300) == 0, log_of(whole).read_text()
    for steps in (1, 4):  # once after a checkpoint, once before
        process = start("grpo", killed)
        wait_for_steps(process, directory / "killed", steps)
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    process = start("grpo", killed)
    assert process.wait(timeout=300) == 0, log_of(killed).read_text()
    assert final_hashes(directory / "killed") == final_hashes(directory / "whole") != {}
    for step in range(1, STEPS + 1):
        name = f"rollouts/step-{step:06d}.jsonl"
        assert (directory / "killed" / name).read_bytes() == (directory / "whole" / name).read_bytes()


@pytest.mark.parametrize("name", ("qwen2_5_vl", pytest.param("qwen3_5", marks=pytest.mark.catalogue)))
def test_sigkill_at_random_moments_changes_no_byte_of_grpo(tiny_checkpoints, tmp_path, name):
    changes = {"train": {"steps": STEPS, "save_every": 2, "threads": 1}, "data": {"eval": None, "workers": 1}}
    rows = write_rows(tmp_path)
    checkpoint = tiny_checkpoints[name]
    whole = write_recipe(tmp_path / "whole.yaml", grpo_recipe(checkpoint, rows, tmp_path / "whole", **changes))
    killed = write_recipe(tmp_path / "killed.yaml", grpo_recipe(checkpoint, rows, tmp_path / "killed", **changes))
    process = start("grpo", whole)
    assert process.wait(timeout=300) == 0, log_of(whole).read_text()
    expected = final_hashes(tmp_path / "whole")
    assert set(expected) == {"adapter/adapter_model.safetensors", "optimizer.safetensors"}
    step_seconds = mean(row["time/step"] for row in read_metrics(tmp_path / "whole"))

    moments = random.Random(0)
    kills = 0
    while kills < KILLS:
        process = start("grpo", killed)
        wait_for_steps(process, tmp_path / "killed", moments.randrange(STEPS - 1))
        try:
            code = process.wait(timeout=2 * step_seconds * moments.random())
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            continue
        assert code == 0, log_of(killed).read_text()
        assert final_hashes(tmp_path / "killed") == expected
        for path in sorted((tmp_path / "killed").rglob("*"), reverse=True):  # finished between two kills: start over
            path.rmdir() if path.is_dir() else path.unlink()
        (tmp_path / "killed").rmdir()
    process = start("grpo", killed)
    assert process.wait(timeout=300) == 0, log_of(killed).read_text()
    assert final_hashes(tmp_path / "killed") == expected
    assert [row["step"] for row in read_metrics(tmp_path / "killed")] == list(range(1, STEPS + 1))
    for step in range(1, STEPS + 1):
        name = f"rollouts/step-{step:06d}.jsonl"
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_run_goes_on_with_other_microbatches_and_workers_and_ends_as_it_would_have(tiny_checkpoints, tmp_path):
    rows, checkpoint = write_rows(tmp_path), tiny_checkpoints["qwen2_5_vl"]
    whole, changed = tmp_path / "whole", tmp_path / "changed"
    small = {"max_tokens_per_microbatch": 220, "gradient_checkpointing": "full", "form": "repeated"}
    base = {"data": {"eval": None, "workers": 0}, "learner": {"max_tokens_per_microbatch": 900}}
    run_grpo(grpo_recipe(checkpoint, rows, whole, **base))
    run_grpo(grpo_recipe(checkpoint, rows, changed, **base, train={"steps": 2}))
    data = {"eval": None, "workers": 1, "image_root": str(rows.parent)}
    run_grpo(grpo_recipe(checkpoint, rows, changed, data=data, learner=small))
    assert "max_tokens_per_microbatch: was 900, is 220 now" in (changed / "log.txt").read_text()
    weights = [load_file(run / "checkpoints/step-000003/adapter/adapter_model.safetensors") for run in (whole, changed)]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-3, atol=1e-5)
    assert [row["step"] for row in read_metrics(changed)] == [1, 2, 3]


def test_muon_goes_on_with_the_same_bytes(tiny_checkpoints, tmp_path):
    rows, checkpoint = write_rows(tmp_path), tiny_checkpoints["qwen2_5_vl"]
    changes = {"lora": None, "freeze": [], "optim": {"name": "muon", "lr": 1e-3, "weight_decay": 0.1}}
    changes |= {"data": {"eval": None, "workers": 0}}

    def trained(name: str, steps: int) -> Path:
        train = {"steps": steps, "save_every": 3, "threads": 1}
        return run_offline(sft_recipe(checkpoint, rows, tmp_path / name, train=train, **changes))

    whole = trained("whole", STEPS)
    trained("halved", STEPS // 2)
    halved = trained("halved", STEPS)
    assert final_hashes(halved) == final_hashes(whole)
    assert set(final_hashes(whole)) == {"model/model.safetensors", "optimizer.safetensors"}
    losses = [row["loss"] for row in read_metrics(whole)]
    assert losses[-1] < losses[0] - 0.5


def test_sigterm_saves_and_ends_with_75(tiny_checkpoints, tmp_path):
    recipe = sft_recipe(
        tiny_checkpoints["qwen2_vl"],
        write_rows(tmp_path),
        tmp_path / "run",
        lora=None,
        train={"steps": 5000, "save_every": 5000, "threads": 1},
        data={"eval": None, "workers": 1},
    )
    file = write_recipe(tmp_path / "recipe.yaml", recipe)
    process = start("sft", file)
    wait_for_steps(process, tmp_path / "run", 4)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75, log_of(file).read_text()
    last = int(read_metrics(tmp_path / "run")[-1]["step"])
    assert (tmp_path / f"run/checkpoints/step-{last:06d}/MANIFEST.json").is_file()
