"""The plan's numbers for teachers and reward models, against real ones of the same shape."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.rewards.runtime.test_model import save_reward_model
from tests.training.test_loops import grpo_recipe, sft_recipe, write_rows
from tiercel.cli.main import main
from tiercel.config import recipe_to_yaml
from tiercel.config.conflicts.rewards import reward_models
from tiercel.config.keys import RECIPES
from tiercel.errors import EnvironmentProblem
from tiercel.planning.frozen_models import (
    FrozenBytes,
    held_by_rank,
    reward_model_size,
    teacher_size,
    tokens_without_gradient,
)
from tiercel.planning.probe import LiveBytes


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return save_reward_model(tmp_path / "scorer")


def recipe_with(tiny_checkpoints, tmp_path: Path, checkpoint: Path, **options):
    model = {"path": str(checkpoint), "dtype": "float32", "max_tokens": 128, "batch_tokens": 1024, **options}
    rewards = [{"name": "model", "model": model}, {"name": "exact"}]
    return grpo_recipe(tiny_checkpoints["qwen2_vl"], write_rows(tmp_path), tmp_path / "run", rewards=rewards)


def test_bytes_are_those_of_the_real_model(tiny_checkpoints, tmp_path, checkpoint):
    (options,) = reward_models(recipe_with(tiny_checkpoints, tmp_path, checkpoint))
    size = reward_model_size(options)
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint).eval()
    assert size.weights == sum(parameter.nbytes for parameter in model.parameters())
    with torch.no_grad(), LiveBytes() as live:
        rows = torch.zeros(8, 128, dtype=torch.int64)
        mask = torch.ones_like(rows)
        mask[:, -1] = 0  # padding, without which no mask is made
        resident = live.start_again()
        model(input_ids=rows, attention_mask=mask, use_cache=False)
    assert size.largest_pass == pytest.approx(live.peak - resident, rel=0.01)


@pytest.mark.parametrize(
    ("kind", "own", "tokens"),
    [
        ("sft", {}, 10_000),
        ("dpo", {"dpo": {"loss": "sigmoid"}}, 20_000),
        ("kto", {"kto": {}}, 20_000),
        ("reward", {"ranking": {}}, 20_000),
        ("distill", {"teacher": {"path": "none"}, "rollout": {"max_new_tokens": 9_000}}, 19_000),
    ],
)
def test_passes_without_gradient_need_no_plan(tmp_path, kind, own, tokens):
    tree = sft_recipe(tmp_path, tmp_path / "rows.jsonl", tmp_path / "run").model_dump(exclude={"sft"})

    def asked(microbatch: int | str, longest: int) -> int:
        changes = {
            "learner": {"max_tokens_per_microbatch": microbatch},
            "data": {"train": "r", "max_prompt_tokens": longest},
        }
        recipe = RECIPES[kind].model_validate({**tree, **own, **changes})
        return tokens_without_gradient(recipe)

    assert asked("auto", 100) == 16384
    assert asked("auto", 10_000) == max(16384, tokens)
    assert asked(20_001, 10_000) == 20_001


@pytest.mark.parametrize("kind", ["grpo", "distill"])
def test_a_teacher_that_cannot_be_fetched_is_named_by_its_key(tiny_checkpoints, tmp_path, monkeypatch, kind):
    tree = grpo_recipe(tiny_checkpoints["qwen2_vl"], tmp_path / "rows.jsonl", tmp_path / "run").model_dump(
        exclude={"sft"}
    )
    teacher = {"path": "no/such", "hub": "modelscope"}
    own = {"teacher": teacher} if kind == "distill" else {"algorithm": {"teacher": teacher}}
    monkeypatch.setitem(sys.modules, "modelscope", None)  # importing it fails, so nothing is requested
    with pytest.raises(EnvironmentProblem) as caught:
        teacher_size(RECIPES[kind].model_validate({**tree, **own}))
    assert str(caught.value).startswith(
        ("algorithm." if kind == "grpo" else "") + "teacher.hub: modelscope needs its package"
    )


def test_weights_add_up_and_passes_take_turns():
    sizes = [FrozenBytes(device=device, weights=100, largest_pass=most) for device, most in (("auto", 7), ("cpu", 9))]
    assert held_by_rank(sizes, on_gpu=False) == FrozenBytes(weights=200, largest_pass=9)
    assert held_by_rank(sizes, on_gpu=True) == FrozenBytes(weights=100, largest_pass=7)


@pytest.mark.parametrize(
    ("device", "is_held"), [("auto", True), pytest.param("cpu", False, marks=pytest.mark.catalogue)]
)
def test_the_plan_of_a_gpu_has_the_models_that_lie_there(
    tiny_checkpoints, tmp_path, checkpoint, device, is_held, capsys
):
    bare = tmp_path / "config only"
    bare.mkdir()
    shutil.copy(checkpoint / "config.json", bare)
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe_to_yaml(recipe_with(tiny_checkpoints, tmp_path, bare, device=device)))
    assert main(["plan", str(file), "learner.compile=false", "--gpus", "1", "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["options"][0]["memory"]
    assert ("reward models" in memory["components"]) == is_held
    assert ("reward" in memory["phases"]) == is_held


def test_a_config_that_is_no_classifiers_is_named(tiny_checkpoints, tmp_path, capsys):
    bare = tmp_path / "config only"
    bare.mkdir()
    (bare / "config.json").write_text('{"model_type": "clip_vision_model"}')
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe_to_yaml(recipe_with(tiny_checkpoints, tmp_path, bare)))
    assert main(["plan", str(file), "--gpus", "1"]) == 2
    assert f"{bare}: not a config.json of a sequence classifier" in capsys.readouterr().err
