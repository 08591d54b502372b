"""What `tiercel export` writes for a reward model, and for a run on quantised weights."""

import re

import pytest
import torch
from safetensors.torch import load_file

from tests.rewards.runtime.test_values import save_value_adapter
from tests.tiny_models import tiny_policy
from tests.training.test_loops import run_offline, sft_recipe, write_rows
from tiercel.cli.main import main
from tiercel.config.schema import RewardRecipe
from tiercel.errors import RunError
from tiercel.inference_and_export.export import export
from tiercel.inference_and_export.weights import CheckpointChoice
from tiercel.models.policy import WHOLE_FILE
from tiercel.models.weights.saving import save_trained
from tiercel.runs.checkpoints import save_checkpoint


def test_the_value_head_of_a_merged_bfloat16_model_is_not_rounded(tiny_checkpoints, tmp_path):
    checkpoint = tiny_checkpoints["qwen2_5_vl"]
    policy = tiny_policy(checkpoint, noise=0.1)
    written = save_checkpoint(
        tmp_path / "checkpoints", 1, lambda place: save_value_adapter(policy, place / "adapter"), {}
    )
    recipe = RewardRecipe.model_validate(
        {
            "model": {"path": str(checkpoint), "dtype": "bfloat16"},
            "lora": {"rank": 4, "alpha": 8},
            "data": {"train": "rows.jsonl"},
            "ranking": {},
            "train": {"steps": 1},
            "output": "run",
        }
    )
    merged = export(recipe, tmp_path, tmp_path / "merged", merge=True)
    trained, head = (load_file(place / WHOLE_FILE)["value_head.weight"] for place in (written / "adapter", merged))
    assert torch.equal(head, trained) and not torch.equal(trained.bfloat16().float(), trained)
    assert {tensor.dtype for tensor in load_file(merged / "model.safetensors").values()} == {torch.bfloat16}
    (tmp_path / "empty").mkdir()
    assert (export(recipe, tmp_path, tmp_path / "empty", merge=True) / "config.json").is_file()
    before = set(tmp_path.iterdir())
    for choice in (CheckpointChoice(step=1), CheckpointChoice(step=99)):
        with pytest.raises(RunError):  # an adapter alone would not be the policy; there is no such checkpoint
            export(recipe, tmp_path, tmp_path / "adapter", merge=False, choice=choice)
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("kind", ("nf4", "int8"))
def test_a_quantised_run_is_merged_into_the_checkpoints_own_weights(tiny_checkpoints, tmp_path, capsys, kind):
    pytest.importorskip("bitsandbytes")
    checkpoint = tiny_checkpoints["qwen2_5_vl"]
    model = {"path": str(checkpoint), "dtype": "float32", "quantize": kind}
    recipe = sft_recipe(checkpoint, write_rows(tmp_path), tmp_path / "run", model=model, data={"eval": None})
    run = run_offline(recipe)
    assert main(["export", str(run), "--merge"]) == 0
    told = capsys.readouterr().out
    error = float(
        re.search(rf"the {kind} ones that the adapter was trained on are ([\d.]+)% of their norm away", told)[1]
    )
    assert {"nf4": 5, "int8": 0.1}[kind] < error < {"nf4": 12, "int8": 1}[kind]
    own, merged = (load_file(each / "model.safetensors") for each in (checkpoint, run / "model"))
    adapter = load_file(run / "checkpoints/step-000003/adapter/adapter_model.safetensors")
    layer, name = "layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj.weight"
    (first,) = (tensor for key, tensor in adapter.items() if f"{layer}.lora_A" in key)
    (second,) = (tensor for key, tensor in adapter.items() if f"{layer}.lora_B" in key)
    key = name if name in own else "model." + name.removeprefix("model.language_model.")
    torch.testing.assert_close(merged[key], own[key] + 8 / 4 * second @ first)
    words = ["predict", str(checkpoint), "Where?", "--max-new-tokens", "2", "--quantize", kind]
    assert main([*words, "--adapter", str(run / "checkpoints/step-000003/adapter")]) == 0
    assert main(["predict", str(run), "Where?", "--quantize", kind]) == 2


@pytest.mark.parametrize(
    ("dtype", "noise", "is_told"), [("bfloat16", 1e-5, True), ("bfloat16", 0.5, False), ("float32", 1e-5, False)]
)
def test_an_adapter_that_rounding_takes_away_is_told(tiny_checkpoints, tmp_path, capsys, dtype, noise, is_told):
    """As in PEFT 1388 and Unsloth 3091: the merged model answers as the one before training."""
    checkpoint = tiny_checkpoints["qwen2_5_vl"]
    policy = tiny_policy(checkpoint, noise=noise)
    save_checkpoint(tmp_path / "checkpoints", 1, lambda place: save_trained(policy, place), {})
    model = {"path": str(checkpoint), "dtype": dtype}
    recipe = sft_recipe(checkpoint, write_rows(tmp_path), tmp_path / "run", model=model, data={"eval": None})
    export(recipe, tmp_path, tmp_path / "merged", merge=True)
    told = re.search(r"rounded to bfloat16, the merged weights keep (\d+)%", capsys.readouterr().out)
    assert (told is not None) == is_told and (told is None or int(told[1]) < 60)
