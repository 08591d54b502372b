"""Whole runs on the pretended accelerator; test_accelerator.py runs these tests in a process of their own."""

from pathlib import Path

import pytest

from tests.accelerator.device import WaitsForDevice, register
from tests.tiny_models import FAMILY_NAMES
from tests.training.test_loops import grpo_recipe, run_grpo, write_rows
from tiercel.learner.learner import Learner
from tiercel.runs.directory import read_metrics
from tiercel.training import build

DEVICE, LIBRARY = register()
ALONE = {"data": {"workers": 0, "eval": None}, "train": {"steps": 1}}
FEW_TOKENS = {"form": "dense", "max_tokens_per_microbatch": 250}


@pytest.fixture(autouse=True)
def on_device(monkeypatch):
    monkeypatch.setattr(build, "training_device", lambda: DEVICE)


@pytest.fixture
def rows(tmp_path) -> Path:
    return write_rows(tmp_path)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_step_of_grpo_is_the_cpus(tiny_checkpoints, rows, name, monkeypatch):
    recipes = [
        grpo_recipe(tiny_checkpoints[name], rows, rows.parent / place, learner=FEW_TOKENS, **ALONE)
        for place in ("device", "cpu")
    ]
    run_grpo(recipes[0])
    monkeypatch.undo()
    run_grpo(recipes[1])
    there, here = (read_metrics(rows.parent / place)[-1] for place in ("device", "cpu"))
    assert there["grad_norm"] == pytest.approx(here["grad_norm"], rel=1e-3)
    assert there["reward/mean"] == here["reward/mean"]
    assert there["sampler/logprob_gap_mean"] < 1e-4


def test_a_read_in_the_learner_is_refused(tiny_checkpoints, rows, monkeypatch):
    embedded = Learner._embedded

    def reading(self, batch, features_KH):
        embeddings_TH = embedded(self, batch, features_KH)
        Learner.seen = embeddings_TH.sum().item()
        return embeddings_TH

    reading.__module__ = Learner.__module__
    monkeypatch.setattr(Learner, "_embedded", reading)
    with pytest.raises(WaitsForDevice):
        run_grpo(grpo_recipe(tiny_checkpoints["qwen2_vl"], rows, rows.parent / "run", learner=FEW_TOKENS, **ALONE))
