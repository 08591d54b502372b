"""What `tiercel export` writes of a reward model."""

import torch
from safetensors.torch import load_file

from tests.scoring.test_values import save_value_adapter
from tests.tiny_models import tiny_policy
from tiercel.cli.export import export
from tiercel.config.schema import RewardRecipe
from tiercel.models.policy import WHOLE_FILE
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
