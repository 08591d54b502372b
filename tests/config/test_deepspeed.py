"""DeepSpeed's config: made from the recipe, and a user's own checked against it."""

import json

import pytest

from tiercel.config.deepspeed import deepspeed_problems, zero_config
from tiercel.config.schema import SftRecipe


def recipe_with(tmp_path, theirs: dict | None = None, **zero) -> SftRecipe:
    if theirs is not None:
        (tmp_path / "zero.json").write_text(json.dumps(theirs))
        zero["config"] = str(tmp_path / "zero.json")
    tree = {
        "model": {"path": "somewhere"},
        "data": {"train": "rows.jsonl"},
        "optim": {"lr": 2e-5, "max_grad_norm": 0.5},
        "train": {"steps": 1, "strategy": "deepspeed", "deepspeed": zero},
        "output": "run",
    }
    return SftRecipe.model_validate(tree)


def problems(tmp_path, theirs: dict, **zero) -> str:
    return "\n".join(problem.line for problem in deepspeed_problems(recipe_with(tmp_path, theirs, **zero)))


def test_the_recipe_alone_makes_a_config(tmp_path):
    config = zero_config(recipe_with(tmp_path, offload_parameters=True), on_cpu=False)
    assert config["gradient_clipping"] == 0.5 and config["optimizer"]["params"]["lr"] == 2e-5
    section = config["zero_optimization"]
    assert section["stage"] == 3 and section["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert "offload_optimizer" not in section


def test_a_users_file_adds_and_auto_leaves_the_recipes(tmp_path):
    theirs = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.0}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000, "stage3_prefetch_bucket_size": "auto"},
    }
    config = zero_config(recipe_with(tmp_path, theirs), on_cpu=True)
    assert config["zero_optimization"]["reduce_bucket_size"] == 1000
    assert "stage3_prefetch_bucket_size" not in config["zero_optimization"]
    assert config["optimizer"]["params"]["lr"] == 2e-5 and config["gradient_clipping"] == 0.5


@pytest.mark.parametrize(
    ("theirs", "said"),
    (
        ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage is 2, but train.deepspeed.stage is 3"),
        ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type is OneBitAdam, but ZeRO stage 3"),
        ({"optimizer": {"params": {"lr": 1e-3}}}, "optimizer.params.lr is 0.001, but optim.lr is 2e-05"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps is 4, but learner.max_tokens_per_microbatch"),
        ({"gradient_clipping": 1.0}, "gradient_clipping is 1.0, but optim.max_grad_norm"),
        ({"fp16": {"enabled": True}}, "fp16 is "),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}},
            "offload_param.device is nvme, but train.deepspeed.offload_parameters is false",
        ),
    ),
)
def test_a_contradiction_is_refused_by_name(tmp_path, theirs, said):
    assert said in problems(tmp_path, theirs)


def test_all_contradictions_are_told_at_once(tmp_path):
    text = problems(tmp_path, {"train_batch_size": 8, "scheduler": {"type": "WarmupLR"}})
    assert len(text.splitlines()) == 2 and all("zero.json" in line for line in text.splitlines())


@pytest.mark.parametrize("text", ("{", "[]"))
def test_a_file_that_is_no_json_object_is_named(tmp_path, text):
    (tmp_path / "zero.json").write_text(text)
    recipe = recipe_with(tmp_path, config=str(tmp_path / "zero.json"))
    (problem,) = deepspeed_problems(recipe)
    assert problem.key == "train.deepspeed.config" and "zero.json cannot be read as a JSON object" in problem.text
