"""Runs whose adapter changes experts."""

import pytest
import torch

from tests.tiny_models import EXPERT_FAMILIES
from tests.training.test_loops import grpo_recipe, run_grpo, run_offline, sft_recipe, write_rows
from tiercel.inference_and_export.export import export
from tiercel.models.policy import load_for_inference
from tiercel.runs.directory import read_metrics

TARGETS = r".*(self_attn\.[qkvo]_proj|mlp\.experts\.(gate_up_proj|down_proj))"
LORA = {"lora": {"rank": 4, "alpha": 8, "targets": TARGETS}}


@pytest.mark.parametrize("name", (EXPERT_FAMILIES[0], pytest.param(EXPERT_FAMILIES[1], marks=pytest.mark.catalogue)))
def test_three_steps_with_an_adapter_of_experts_and_its_export(tiny_checkpoints, tmp_path, name):
    rows = write_rows(tmp_path)
    recipe = grpo_recipe(tiny_checkpoints[name], rows, tmp_path / "run", **LORA)
    run = run_grpo(recipe)
    for row in read_metrics(run)[1:]:
        assert row["grad_norm"] > 0 and row["sampler/logprob_gap_mean"] < 1e-4
        assert 1 <= row["experts/load_max"] <= 2 and 0 <= row["experts/load_min"] <= 1  # each token uses 2 of 4 experts
        assert 0 <= row["experts/unused_fraction"] < 1
    merged = export(recipe, run, tmp_path / "merged", merge=True)
    again = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(merged)})})
    ids = torch.arange(8)[None]
    with torch.no_grad():
        trained = load_for_inference(recipe, torch.device("cpu"), run / "checkpoints/step-000003/adapter")
        found = load_for_inference(again, torch.device("cpu"), None).model(input_ids=ids).logits
        torch.testing.assert_close(found, trained.model(input_ids=ids).logits, rtol=0, atol=1e-4)
    sft = read_metrics(run_offline(sft_recipe(tiny_checkpoints[name], rows, tmp_path / "sft", **LORA)))
    assert sft[3]["eval/loss"] < sft[0]["eval/loss"] and sft[3]["experts/load_max"] >= 1
