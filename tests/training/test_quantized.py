"""Runs on a quantised base: they learn as the others do, and resume to the same bytes after a kill."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, stdev

import pytest
import yaml

from examples.scenes import SceneSet, write_scenes
from tests.training.test_loops import grpo_recipe, merged, run_grpo, run_offline, sft_recipe, write_rows
from tiercel.config import GrpoRecipe, SftRecipe
from tiercel.runs.directory import read_metrics

pytest.importorskip("bitsandbytes")
KINDS = ("nf4", "int8")
START = Path(__file__).parents[2] / "tiercel/demo/pointing_start"  # a Qwen2.5-VL that reads handwriting
STEPS, SEEDS = 20, (0, 1, 2)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory) -> Path:
    """Boxes of handwritten digits: rows of the demo."""
    return write_scenes(tmp_path_factory.mktemp("scenes"), SceneSet(name="practice", count=240, seed=5))


def model_of(path: Path, kind: str | None) -> dict:
    return {"path": str(path), "dtype": "float32", "quantize": kind}


def last_losses(run: Path) -> float:
    """The mean of the last quarter."""
    return mean(row["loss"] for row in read_metrics(run)[-STEPS // 4 :])


def sft_loss(checkpoint: Path, rows: Path, output: Path, kind: str | None, seed: int) -> tuple[float, float]:
    """Of the first step, and of the last ones."""
    recipe = sft_recipe(checkpoint, rows, output, model=model_of(checkpoint, kind), optim={"lr": 2e-3})
    changes = {"data": {"eval": None}, "train": {"steps": STEPS, "seed": seed}, "optim": {"prompts_per_step": 12}}
    run = run_offline(SftRecipe.model_validate(merged(recipe.model_dump(), changes)))
    return read_metrics(run)[1]["loss"], last_losses(run)


@pytest.mark.quantized
@pytest.mark.parametrize("family", ("demo", "qwen3_5"))
def test_twenty_steps_of_sft_are_within_the_noise_of_seeds(tiny_checkpoints, scenes, tmp_path, family):
    checkpoint, rows = (START, scenes) if family == "demo" else (tiny_checkpoints[family], write_rows(tmp_path, 60))
    plain = [sft_loss(checkpoint, rows, tmp_path / f"plain-{seed}", None, seed)[1] for seed in SEEDS]
    for kind in KINDS:
        found = [sft_loss(checkpoint, rows, tmp_path / f"{kind}-{seed}", kind, seed) for seed in SEEDS]
        assert all(last < first for first, last in found)
        reached = mean(last for _, last in found)
        print(f"{family} {kind}: {reached:.3f}; without {mean(plain):.3f} +- {stdev(plain):.3f}")
        assert abs(reached - mean(plain)) < 3 * stdev(plain)


def grpo_reward(checkpoint: Path, rows: Path, output: Path, kind: str | None, seed: int) -> float:
    """The mean reward of the last quarter."""
    recipe = grpo_recipe(checkpoint, rows, output, model=model_of(checkpoint, kind))
    own = {"call": f"{rows.parent}/mine.py:variety"}
    changes = {
        "data": {"eval": None},
        "rewards": [{"name": "iou"} if checkpoint == START else own],
        "rollout": {"group_size": 8, "max_new_tokens": 12},
        "optim": {"lr": 2e-3, "prompts_per_step": 12},
        "train": {"steps": STEPS, "seed": seed},
    }
    run = run_grpo(GrpoRecipe.model_validate(merged(recipe.model_dump(), changes)))
    rows_of_run = read_metrics(run)[1:]
    assert all(row["sampler/logprob_gap_mean"] < 1e-4 for row in rows_of_run)  # the engine has the same weights
    return mean(row["reward/mean"] for row in rows_of_run[-STEPS // 4 :])


@pytest.mark.quantized
@pytest.mark.parametrize("family", ("demo", "qwen3_5"))
def test_twenty_steps_of_grpo_are_within_the_noise_of_seeds(tiny_checkpoints, scenes, tmp_path, family):
    checkpoint, rows = (START, scenes) if family == "demo" else (tiny_checkpoints[family], write_rows(tmp_path, 60))
    plain = [grpo_reward(checkpoint, rows, tmp_path / f"plain-{seed}", None, seed) for seed in SEEDS]
    for kind in KINDS:
        found = grpo_reward(checkpoint, rows, tmp_path / kind, kind, SEEDS[0])
        print(f"{family} {kind}: reward {found:.3f}; without {mean(plain):.3f} +- {stdev(plain):.3f}")
        assert abs(found - mean(plain)) < 3 * stdev(plain)


@pytest.mark.quantized
@pytest.mark.parametrize("verb", ("sft", "grpo"))
@pytest.mark.parametrize(
    ("family", "kind", "name"), (("qwen2_5_vl", "nf4", "adamw_8bit"), ("qwen3_5", "int8", "adamw"))
)
def test_a_killed_run_goes_on_to_the_same_bytes(tiny_checkpoints, tmp_path, verb, family, kind, name):
    make = sft_recipe if verb == "sft" else grpo_recipe
    checkpoint, rows = tiny_checkpoints[family], write_rows(tmp_path)
    train = {"steps": 8, "save_every": 1, "keep": 2}
    changes = {"model": model_of(checkpoint, kind), "lora": {"rank": 64, "alpha": 64}, "optim": {"name": name}}
    recipe = make(checkpoint, rows, tmp_path / "run", train=train, **changes)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json", exclude_none=True)))
    command = [sys.executable, "-m", "tiercel", verb, "recipe.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(START.parents[2]), "OMP_NUM_THREADS": "1"}

    def started() -> subprocess.Popen:
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)

    assert started().wait(300) == 0
    shutil.move(tmp_path / "run", tmp_path / "whole")
    killed, deadline = started(), time.monotonic() + 300
    while not (tmp_path / "run/checkpoints/step-000003").is_dir():
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait(60) == -signal.SIGKILL
    assert started().wait(300) == 0
    for name in ("adapter/adapter_model.safetensors", "optimizer.safetensors"):
        first, second = (tmp_path / each / "checkpoints/step-000008" / name for each in ("whole", "run"))
        assert first.read_bytes() == second.read_bytes()
    same = ("loss", "grad_norm") + (("reward/mean",) if verb == "grpo" else ())
    whole, again = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "run")
    assert [[row.get(key) for key in same] for row in whole] == [[row.get(key) for key in same] for row in again]
