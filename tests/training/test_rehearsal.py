"""What `tiercel check` refuses in a model, an adapter and a teacher is what a start refuses, in the same words."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.generic_models import TEXT_KEYS, Tiny, save_generic_checkpoint
from tests.tiny_models import FAMILY_NAMES, tiny_policy, tiny_recipe
from tests.training.test_loops import grpo_recipe
from tiercel.config.schema import Learner, Lora, Optim, PartRates, Teacher
from tiercel.errors import EnvironmentProblem, ModelError
from tiercel.models.families.loading import load_family
from tiercel.models.weights.saving import save_adapter
from tiercel.training.start_checks import rehearse
from tiercel.training.trainer import build_trainer

QKVO = r".*self_attn\.(q|k|v|o)_proj"


def said_by(call, recipe) -> str:
    with pytest.raises((ModelError, EnvironmentProblem)) as error:
        call(recipe)
    return str(error.value)


def rehearsed(recipe) -> list[str]:
    return rehearse(recipe, load_family(recipe.model))


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_a_recipe_that_starts_is_passed(tiny_checkpoints, tmp_path, name):
    lora = Lora(rank=4, alpha=8, targets="all")
    save_adapter(tiny_policy(tiny_checkpoints[name], lora, noise=0.1), tmp_path)
    before = torch.get_rng_state()
    rehearsed(tiny_recipe(tiny_checkpoints[name], lora=lora.model_copy(update={"init": str(tmp_path)})))
    rehearsed(tiny_recipe(tiny_checkpoints[name], lora=None, freeze=("vision",)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"lora": Lora(targets="query_proj")}, "'query_proj' matches no linear layer"),
        ({"lora": Lora(targets=".*")}, "matches lm_head"),
        ({"lora": Lora(targets="language"), "freeze": ("projector",)}, ""),
        ({"learner": Learner(form="flex")}, "learner.form: flex has no backward pass on a CPU; use split"),
        ({"optim": Optim(lr=1e-5, name="paged_adamw")}, "paged_adamw needs a GPU"),
        (
            {"lora": Lora(targets=".*language.*q_proj"), "optim": Optim(lr=1e-5, part_lr=PartRates(vision=1e-6))},
            "optim.part_lr.vision",
        ),
    ],
)
def test_what_a_start_refuses_of_a_recipe_is_refused(tiny_checkpoints, monkeypatch, keys, words):
    recipe = tiny_recipe(tiny_checkpoints["qwen2_5_vl"], **({"lora": Lora(rank=4, alpha=8)} | keys))
    if not words:
        rehearsed(recipe)
        return
    if torch.cuda.is_available():
        pytest.skip("a GPU computes some of these")
    assert words in said_by(rehearsed, recipe) == said_by(build_trainer, recipe)


def with_config(directory: Path, **keys) -> None:
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": 8}, "has rank 4, but the recipe has 8; set lora.rank: 4"),
        ({"targets": r".*self_attn\.q_proj"}, "Only in the adapter: "),
        ({"targets": "language"}, "Only in lora.targets: model.language_model.layers.0.mlp.down_proj, "),
    ],
)
def test_what_a_start_refuses_of_an_adapter_is_refused(tiny_checkpoints, tmp_path, change, words):
    lora = Lora(rank=4, alpha=8, targets=QKVO)
    save_adapter(tiny_policy(tiny_checkpoints["qwen2_5_vl"], lora), tmp_path)
    lora = lora.model_copy(update={"init": str(tmp_path)} | change)
    recipe = tiny_recipe(tiny_checkpoints["qwen2_5_vl"], lora=lora)
    assert words in said_by(rehearsed, recipe) == said_by(build_trainer, recipe)


@pytest.mark.parametrize("kind", ("half", "shapes", "bias"))
def test_what_a_start_refuses_of_an_adapters_files_is_refused(tiny_checkpoints, tmp_path, kind):
    lora = Lora(rank=4, alpha=8, targets=QKVO, init=str(tmp_path))
    save_adapter(tiny_policy(tiny_checkpoints["qwen2_5_vl"], lora.model_copy(update={"init": None})), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    weights = load_file(file)
    if kind == "half":
        save_file({name: each for name, each in weights.items() if "layers.0" in name}, file)
    elif kind == "shapes":
        save_file({name: each.repeat(2, 1) for name, each in weights.items()}, file)
    else:
        with_config(tmp_path, bias="all")
    recipe = tiny_recipe(tiny_checkpoints["qwen2_5_vl"], lora=lora)
    assert said_by(rehearsed, recipe) == said_by(build_trainer, recipe)


@pytest.mark.parametrize("kind", ("missing", "shape"))
def test_weights_that_are_not_those_of_the_config_are_refused(tiny_checkpoints, tmp_path, kind):
    place = Path(shutil.copytree(tiny_checkpoints["gemma3"], tmp_path / "checkpoint"))
    weights = load_file(place / "model.safetensors")
    name = next(name for name in weights if "layers.0.mlp.up_proj" in name)
    spoilt = {key: each for key, each in weights.items() if key != name}
    if kind == "shape":
        spoilt[name] = weights[name][1:].clone()
    save_file(spoilt, place / "model.safetensors", metadata={"format": "pt"})
    recipe = tiny_recipe(place, lora=Lora(rank=4, alpha=8))
    assert said_by(rehearsed, recipe) == said_by(build_trainer, recipe)


def test_a_teacher_is_put_together_too(tiny_checkpoints, tmp_path):
    path = str(tiny_checkpoints["qwen2_5_vl"])
    save_adapter(tiny_policy(tiny_checkpoints["qwen2_5_vl"], noise=0.1), tmp_path / "adapter")
    with_config(tmp_path / "adapter", r=8)
    recipe = grpo_recipe(tiny_checkpoints["qwen2_5_vl"], tmp_path / "rows.jsonl", tmp_path / "run")
    for adapter, words in ((str(tmp_path / "adapter"), "size mismatch"), (str(tmp_path), "is not an adapter")):
        section = Teacher(path=path, adapter=adapter, dtype="float32")
        taught = recipe.model_copy(update={"algorithm": recipe.algorithm.model_copy(update={"teacher": section})})
        assert words in said_by(rehearsed, taught)


def spoilt(checkpoint: Path, place: Path, file: str, change) -> Path:
    shutil.copytree(checkpoint, place)
    found = json.loads((place / file).read_text())
    change(found)
    (place / file).write_text(json.dumps(found))
    return place


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"patch_size": 16}, "patch_size is 16, but in config.json patch_size is 14"),
        ({"merge_size": 1}, "merge_size is 1, but in config.json spatial_merge_size is 2"),
        ({"image_mean": [0.5, 0.5]}, "image_mean has 2 numbers, but a pixel has 3 colours"),
    ],
)
def test_an_image_processor_that_is_not_the_models_is_refused(tiny_checkpoints, tmp_path, keys, said):
    file = "preprocessor_config.json"
    place = spoilt(tiny_checkpoints["qwen2_5_vl"], tmp_path / "it", file, lambda found: found.update(keys))
    with pytest.raises(ModelError, match=said):
        rehearsed(tiny_recipe(place, lora=Lora(rank=4, alpha=8)))


def test_an_image_processor_of_another_family_is_refused(tiny_checkpoints, tmp_path):
    place = Path(shutil.copytree(tiny_checkpoints["qwen2_5_vl"], tmp_path / "it"))
    shutil.copy(tiny_checkpoints["internvl"] / "preprocessor_config.json", place)
    with pytest.raises(ModelError, match=r"preprocessor_config\.json does not belong to this model: "):
        rehearsed(tiny_recipe(place, lora=Lora(rank=4, alpha=8)))


@pytest.mark.parametrize(
    "keys",
    [
        {"num_attention_heads": 2, "num_key_value_heads": 1},
        {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 10000.0}},
    ],
)
def test_a_config_of_equal_shapes_that_cannot_be_computed_is_refused(tiny_checkpoints, tmp_path, keys):
    change = lambda found: found["text_config"].update(keys)  # noqa: E731
    place = spoilt(tiny_checkpoints["qwen2_5_vl"], tmp_path / "it", "config.json", change)
    with pytest.raises(ModelError, match=r"config\.json does not belong to the weights: "):
        rehearsed(tiny_recipe(place, lora=Lora(rank=4, alpha=8)))


@pytest.mark.parametrize(("named", "is_told"), (("org/Other-3B", True), ("/data/qwen2_5_vl", False), (None, False)))
def test_another_base_model_of_an_adapter_is_told(tiny_checkpoints, tmp_path, named, is_told):
    lora = Lora(rank=4, alpha=8, targets=QKVO, init=str(tmp_path))
    trained = tiny_policy(tiny_checkpoints["qwen2_5_vl"], lora.model_copy(update={"init": None}), noise=0.1)
    save_adapter(trained, tmp_path)
    with_config(tmp_path, base_model_name_or_path=named)
    lines = rehearsed(tiny_recipe(tiny_checkpoints["qwen2_5_vl"], lora=lora))
    assert len(lines) == is_told and all(f"says that it was made for {named}; this model is " in line for line in lines)


def test_an_adapter_that_changes_nothing_is_told(tiny_checkpoints, tmp_path):
    lora = Lora(rank=4, alpha=8, targets=QKVO, init=str(tmp_path))
    save_adapter(tiny_policy(tiny_checkpoints["qwen2_5_vl"], lora.model_copy(update={"init": None})), tmp_path)
    with_config(tmp_path, base_model_name_or_path=None)
    (line,) = rehearsed(tiny_recipe(tiny_checkpoints["qwen2_5_vl"], lora=lora))
    assert line.startswith(f"every B matrix of {tmp_path} is 0, so this adapter changes nothing")


def test_weights_of_parts_that_the_architecture_lacks_are_told(tiny_checkpoints, tmp_path):
    place = Path(shutil.copytree(tiny_checkpoints["qwen2_5_vl"], tmp_path / "it"))
    weights = load_file(place / "model.safetensors") | {"mtp.layers.0.weight": torch.ones(3)}
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    (line,) = rehearsed(tiny_recipe(place, lora=Lora(rank=4, alpha=8)))
    assert line.endswith("have; they are ignored: mtp.layers.0.weight")


def test_a_model_that_the_engine_cannot_decode_is_refused_if_it_samples(tmp_path):
    keys = TEXT_KEYS | {"layer_types": ["conv", "full_attention"]}
    checkpoint = save_generic_checkpoint(Tiny(model="Lfm2ForCausalLM", config="Lfm2Config", keys=keys), tmp_path / "it")
    rehearsed(tiny_recipe(checkpoint, lora=Lora(rank=4, alpha=8)))
    recipe = grpo_recipe(checkpoint, tmp_path / "rows.jsonl", tmp_path / "run")
    assert "the local engine cannot sample from" in said_by(rehearsed, recipe)
