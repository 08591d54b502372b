"""A checkpoint that cannot be written, the best one, and rows that are not the checkpoint's."""

from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError

from tests.tiny_models import TINY_LORA, tiny_recipe
from tests.training.test_loops import run_offline, sft_recipe, write_rows
from tiercel.config.schema import Train
from tiercel.errors import DataError, RecipeError, RunError
from tiercel.runs.checkpoints import list_checkpoints
from tiercel.runs.directory import RunDirectory, read_metrics
from tiercel.training import checkpoints as checkpointing
from tiercel.training.checkpoints import Checkpoints


@pytest.fixture
def trainer() -> SimpleNamespace:
    """As much of one as a save needs: 12 bytes of weights, 28 of moments."""
    strategy = SimpleNamespace(
        trained_weights=lambda: {"a": torch.zeros(3)},
        optimizer_tensors=lambda: {"a.exp_avg": torch.zeros(3), "a.step": torch.zeros(2, dtype=torch.float64)},
        scaler_state=dict,
    )
    return SimpleNamespace(strategy=strategy, policy=None)


def checkpoints(path, recipe) -> Checkpoints:
    return Checkpoints(run=RunDirectory(path=path), recipe=recipe, state={})


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_a_full_disk_names_the_directory_and_the_step(trainer, tmp_path, monkeypatch, error):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(checkpointing, "save_trained", fail)
    with pytest.raises(RunError, match=rf"{tmp_path}/checkpoints: the checkpoint of step 3 .*No space left"):
        checkpoints(tmp_path, tiny_recipe(tmp_path, lora=TINY_LORA)).save(trainer, 3, {})


def test_a_save_knows_beforehand_how_much_it_needs(trainer, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=39))
    with pytest.raises(RunError, match="needs 40 bytes, but the disk has only 39 free;"):
        checkpoints(tmp_path, tiny_recipe(tmp_path, lora=TINY_LORA)).save(trainer, 3, {})


def test_the_best_evaluation_is_saved_at_once_and_kept(tiny_checkpoints, tmp_path):
    recipe = sft_recipe(
        tiny_checkpoints["qwen2_vl"],
        write_rows(tmp_path),
        tmp_path / "run",
        optim={"lr": 1e-2, "schedule": "constant"},
        train={"steps": 5, "save_every": 5, "eval_every": 1, "keep": 1, "keep_best": "eval/loss"},
    )
    run = run_offline(recipe)
    losses = {row["step"]: row["eval/loss"] for row in read_metrics(run) if row["step"] > 0}
    best = min(losses, key=losses.__getitem__)
    kept = [step for step, _ in list_checkpoints(run / "checkpoints")]
    assert kept == sorted({5, best}, reverse=True)


def test_a_metric_that_no_reward_yields_is_named(tmp_path):
    recipe = tiny_recipe(tmp_path).model_copy(update={"train": Train(steps=2, keep_best="eval/accuracy")})
    kept = checkpoints(tmp_path, recipe)
    with pytest.raises(RecipeError, match=r"train\.keep_best: is eval/accuracy, but no reward"):
        kept.is_best(0, {"eval/reward/mean": 0.1})
    assert kept.is_best(1, {"eval/accuracy": 0.1})
    assert not kept.is_best(1, {"eval/count": 8})  # every reward failed, which must not end a run of hours


def test_a_run_whose_rows_are_others_than_before_is_refused_and_keeps_what_it_has(tiny_checkpoints, tmp_path):
    rows = write_rows(tmp_path)
    recipe = sft_recipe(
        tiny_checkpoints["qwen2_vl"], rows, tmp_path / "run", train={"steps": 4, "save_every": 2}, data={"eval": None}
    )
    run = run_offline(recipe)
    _, newest = list_checkpoints(run / "checkpoints")[0]
    (newest / "MANIFEST.json").unlink()  # so that the run resumes from step 2
    metrics = (run / "metrics.jsonl").read_bytes()
    whole = rows.read_text()
    first, second, *others = whole.splitlines(keepends=True)
    rows.write_text("".join([second, *others]))
    with pytest.raises(DataError, match=r"data\.train: .*step-0*2 was written \(12 rows then, 11 rows now\)"):
        run_offline(recipe)
    rows.write_text("".join([second, first, *others]))
    with pytest.raises(DataError, match=r"their order .*\(12 rows then, 12 rows now\)"):
        run_offline(recipe)
    assert (run / "metrics.jsonl").read_bytes() == metrics
    rows.write_text(whole)
    assert read_metrics(run_offline(recipe))[-1]["step"] == 4
