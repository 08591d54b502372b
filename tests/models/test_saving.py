"""Plain PEFT and plain transformers load what a run writes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from tests.models.test_families import huggingface_inputs
from tests.tiny_models import FAMILY_NAMES, move_adapter, tiny_policy, tiny_prompts, tiny_recipe
from tiercel.config.schema import Lora, Model
from tiercel.errors import ModelError
from tiercel.models.families.loading import load_family
from tiercel.models.policy import Policy, load_for_inference
from tiercel.models.weights.checkpoint_files import read_tensors
from tiercel.models.weights.loading import load_weights
from tiercel.models.weights.saving import restore_adapter, save_adapter, save_model, save_trained

ALL = Lora(rank=4, alpha=8, targets="all")


def plain_logits(model, policy: Policy) -> torch.Tensor:
    """Of the prompt with one image, by the model's own forward."""
    prompt = tiny_prompts(policy.family)[1]
    with torch.no_grad():
        return model(**huggingface_inputs(policy.family, prompt, prompt.token_ids_P)).logits


def same(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether two values are equal to rounding, because weights may have another layout in memory if another
    reader put them there."""
    return bool((logits - expected).abs().max() < 1e-4)


def plain_model(directory):
    return AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_plain_peft_loads_an_adapter(tiny_checkpoints, tmp_path, name):
    policy = tiny_policy(tiny_checkpoints[name], ALL, noise=0.1)
    save_adapter(policy, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    base = plain_model(tiny_checkpoints[name])
    without = plain_logits(base, policy)
    loaded = PeftModel.from_pretrained(base, tmp_path).eval()
    expected = plain_logits(policy.model, policy)
    assert same(plain_logits(loaded, policy), expected) and not same(without, expected)


def test_an_adapter_of_a_bfloat16_model_is_float32(tiny_checkpoints, tmp_path):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"], dtype="bfloat16", noise=0.1)
    save_adapter(policy, tmp_path)
    assert {tensor.dtype for tensor in load_file(tmp_path / "adapter_model.safetensors").values()} == {torch.float32}


def test_an_adapter_rounded_as_its_products_round_it_gives_the_same_logits(tiny_checkpoints, tmp_path):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"], dtype="bfloat16", noise=0.1)
    before = policy_logits(policy)
    save_adapter(policy, tmp_path, dtype=policy.compute_dtype)
    assert {tensor.dtype for tensor in load_file(tmp_path / "adapter_model.safetensors").values()} == {torch.bfloat16}
    move_adapter(policy, 0.5)
    assert not torch.equal(policy_logits(policy), before)
    restore_adapter(policy, tmp_path)
    assert torch.equal(policy_logits(policy), before)


def policy_logits(policy: Policy) -> torch.Tensor:
    with policy.autocast():
        return plain_logits(policy.model, policy)


def test_the_same_weights_give_the_same_bytes(tiny_checkpoints, tmp_path):
    for place in ("a", "b"):
        policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"], ALL, noise=0.1)
        save_adapter(policy, tmp_path / place)
        save_adapter(policy, tmp_path / place)  # over itself
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_saving_leaves_the_policy_as_it_is(tiny_checkpoints, tmp_path):
    policy = tiny_policy(tiny_checkpoints["qwen2_5_vl"], noise=0.1)
    trained = set(policy.trained_parameters())
    save_adapter(policy, tmp_path)
    assert set(policy.trained_parameters()) == trained
    assert not policy.peft.peft_config["default"].inference_mode


def test_only_the_trained_adapter_is_saved(tiny_checkpoints, tmp_path):
    checkpoint = tiny_checkpoints["qwen2_5_vl"]
    save_adapter(tiny_policy(checkpoint, noise=0.1), tmp_path / "first")
    policy = tiny_policy(checkpoint, Lora(rank=4, alpha=8, init=str(tmp_path / "first")))
    save_adapter(policy, tmp_path / "same")
    first, again = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("first", "same"))
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)
    move_adapter(policy, 0.1, seed=9)
    save_adapter(policy, tmp_path / "moved")
    moved = load_file(tmp_path / "moved" / "adapter_model.safetensors")
    assert moved.keys() == first.keys()
    assert all(torch.equal(first[name], moved[name]) == ("lora_A" in name) for name in first)
    with policy.as_reference():
        save_adapter(policy, tmp_path / "inside")
    assert (tmp_path / "inside" / "adapter_model.safetensors").read_bytes() == (
        tmp_path / "moved" / "adapter_model.safetensors"
    ).read_bytes()


def test_the_config_names_the_base_and_is_json_throughout(tiny_checkpoints, tmp_path):
    save_adapter(tiny_policy(tiny_checkpoints["qwen2_5_vl"]), tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_checkpoints["qwen2_5_vl"])
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8.0)
    assert config["inference_mode"] is True


@pytest.mark.parametrize("with_reference", (False, True))
def test_restoring_gives_back_the_weights(tiny_checkpoints, tmp_path, with_reference):
    checkpoint = tiny_checkpoints["qwen2_5_vl"]
    save_adapter(tiny_policy(checkpoint, ALL, noise=0.1), tmp_path / "first")
    lora = ALL.model_copy(update={"init": str(tmp_path / "first")}) if with_reference else ALL
    policy = tiny_policy(checkpoint, lora)
    move_adapter(policy, 0.1, seed=7)
    expected = {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}
    save_adapter(policy, tmp_path / "checkpoint")

    resumed = tiny_policy(checkpoint, lora)
    assert any(not torch.equal(p, expected[name]) for name, p in resumed.trained_parameters().items())
    restore_adapter(resumed, tmp_path / "checkpoint")
    for name, parameter in resumed.model.named_parameters():  # base and reference included
        assert torch.equal(parameter, expected[name]), name
    assert set(resumed.trained_parameters()) == set(policy.trained_parameters())


@pytest.mark.parametrize(("saved", "given"), [("all", "language"), ("language", "all")])
def test_an_adapter_of_other_layers_is_refused(tiny_checkpoints, tmp_path, saved, given):
    checkpoint = tiny_checkpoints["qwen2_5_vl"]
    save_adapter(tiny_policy(checkpoint, Lora(rank=4, alpha=8, targets=saved)), tmp_path)
    with pytest.raises(ModelError, match=r"the adapter's layers differ from the policy's, such as .*visual.*lora_A"):
        restore_adapter(tiny_policy(checkpoint, Lora(rank=4, alpha=8, targets=given)), tmp_path)


def shapes_in(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    return {name: tuple(each.shape) for name, each in load_file(checkpoint / "model.safetensors").items()}


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_plain_transformers_loads_a_whole_model(tiny_checkpoints, tmp_path, name):
    policy = tiny_policy(tiny_checkpoints[name], None, freeze=())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trained_parameters().values():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    save_model(policy.family, policy.model, tmp_path)
    expected = plain_logits(policy.model, policy)
    loaded = plain_model(tmp_path)
    assert same(plain_logits(loaded, policy), expected)
    assert not same(plain_logits(plain_model(tiny_checkpoints[name]), policy), expected)
    assert shapes_in(tmp_path) == shapes_in(tiny_checkpoints[name])

    text = "Where is the seven? <|im_end|>"
    assert AutoTokenizer.from_pretrained(tmp_path)(text) == policy.family.tokenizer(text)
    family = load_family(Model(path=str(tmp_path)))
    assert family.name == name
    assert family.checkpoint.chat_template == policy.family.checkpoint.chat_template
    assert family.checkpoint.end_token_ids == policy.family.checkpoint.end_token_ids
    assert family.plan_image((120, 50)) == policy.family.plan_image((120, 50))


def test_a_head_of_its_own_is_read_and_exported_though_config_json_ties_it(tiny_checkpoints, tmp_path):
    """Some published config.json say nothing of it, and their family ties heads by default."""
    given = shutil.copytree(tiny_checkpoints["gemma3"], tmp_path / "given")
    (file,) = given.glob("*.safetensors")
    tensors = load_file(file)
    (embedding,) = (name for name in tensors if "embed_tokens" in name)
    save_file({**tensors, "lm_head.weight": tensors[embedding] + 0.5}, file, metadata={"format": "pt"})
    family = load_family(Model(path=str(given), dtype="float32"))
    model = load_weights(family, torch.float32, torch.device("cpu"))
    save_model(family, model, tmp_path / "exported")
    config = json.loads((tmp_path / "exported/config.json").read_text())
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is False
    head = plain_model(tmp_path / "exported").get_output_embeddings().weight
    assert torch.equal(head, tensors[embedding] + 0.5)


def test_files_beside_the_weights_are_copied_byte_for_byte(tiny_checkpoints, tmp_path):
    source = shutil.copytree(tiny_checkpoints["qwen2_5_vl"], tmp_path / "source")
    policy = tiny_policy(source, None)
    end = policy.family.tokenizer.eos_token_id
    (source / "generation_config.json").write_text(f'{{"eos_token_id": [3, {end}], "do_sample": true, "top_p": 0.1}}')
    save_model(policy.family, policy.model, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "preprocessor_config.json"):
        assert (tmp_path / "model" / name).read_bytes() == (source / name).read_bytes()


def test_what_is_trained_decides_what_is_saved(tiny_checkpoints, tmp_path):
    checkpoint = tiny_checkpoints["qwen2_5_vl"]
    assert save_trained(tiny_policy(checkpoint), tmp_path) == tmp_path / "adapter"
    assert save_trained(tiny_policy(checkpoint, None), tmp_path) == tmp_path / "model"
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_a_file_that_is_no_safetensors_is_named(tmp_path):
    file = tmp_path / "optimizer.safetensors"
    file.write_bytes(b"\x80\x02" * 50)
    with pytest.raises(ModelError, match=r"optimizer\.safetensors cannot be read as a safetensors file"):
        read_tensors(file)


def test_weights_that_are_trained_whole_lie_beside_the_adapter(tiny_checkpoints, tmp_path):
    checkpoint = tiny_checkpoints["qwen2_5_vl"]
    policy = tiny_policy(checkpoint, Lora(rank=4, alpha=8), freeze=(), noise=0.1)
    for parameter in policy.whole_parameters().values():
        parameter.data += 0.01
    directory = save_trained(policy, tmp_path)
    again = tiny_policy(checkpoint, Lora(rank=4, alpha=8), freeze=())
    restore_adapter(again, directory)
    assert all(
        torch.equal(value, again.trained_parameters()[name]) for name, value in policy.trained_parameters().items()
    )
    loaded = load_for_inference(tiny_recipe(checkpoint), torch.device("cpu"), directory)
    found = dict(loaded.model.named_parameters())
    assert all(torch.equal(value, found[name]) for name, value in policy.whole_parameters().items())
    with pytest.raises(ModelError, match="trained different weights whole than the policy does"):
        restore_adapter(tiny_policy(checkpoint, Lora(rank=4, alpha=8)), directory)
    with pytest.raises(ModelError, match="tiercel export RUN --merge"):
        tiny_policy(checkpoint, Lora(rank=4, alpha=8, init=str(directory)))
    (directory / "trained_whole.safetensors").unlink()
    with pytest.raises(ModelError, match="trained different weights whole"):
        restore_adapter(again, directory)
