"""Checkpoints that are refused, and what is read from the others."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError
from safetensors.torch import load_file, save_file
from transformers import AddedToken, AutoModelForImageTextToText, AutoTokenizer

from tests.tiny_models import FAMILY_NAMES, tiny_policy
from tiercel.config.schema import Model
from tiercel.errors import DataError, EnvironmentProblem, ModelError
from tiercel.models.families.generic import AnyImageText
from tiercel.models.families.loading import FAMILIES, family_class, load_family
from tiercel.models.families.qwen2_vl import Qwen2VL, Qwen25VL
from tiercel.models.families.text_only import TextOnly
from tiercel.models.rendering import token_ids
from tiercel.models.weights import checkpoint_files
from tiercel.models.weights.checkpoint_files import INDEX, WHOLE, require_finite
from tiercel.models.weights.hub import resolve
from tiercel.models.weights.loading import load_weights
from tiercel.models.weights.saving import save_adapter


@pytest.fixture
def checkpoint(tiny_checkpoints, tmp_path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(tiny_checkpoints["qwen2_5_vl"], tmp_path / "checkpoint"))


def config_directory(tmp_path: Path, config: object) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def edit(file: Path, **changes) -> None:
    """Set keys of a JSON file; None removes one."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_the_architecture_decides(tmp_path):
    assert family_class(config_directory(tmp_path, {"model_type": "qwen2_vl"})) is Qwen2VL
    assert family_class(config_directory(tmp_path, {"model_type": "qwen2_5_vl"})) is Qwen25VL
    assert set(FAMILIES) == set(FAMILY_NAMES)


@pytest.mark.parametrize("config", ({"model_type": "no_such"}, {"model_type": "clip"}, {}))
def test_an_architecture_that_transformers_does_not_know_is_refused(tmp_path, config):
    with pytest.raises(ModelError) as error:
        family_class(config_directory(tmp_path, config))
    assert f"architecture {config.get('model_type')!r} is not a language model of the installed transformers" in str(
        error.value
    )


def test_an_architecture_of_a_newer_transformers_names_the_version(tmp_path):
    config = {"model_type": "no_such", "transformers_version": "9.1.0"}
    with pytest.raises(ModelError, match=r"written by transformers 9\.1\.0: install that version or a newer one"):
        family_class(config_directory(tmp_path, config))


def test_all_other_language_models_have_a_family_that_needs_a_proof(tmp_path):
    assert family_class(config_directory(tmp_path, {"model_type": "llava"})) is AnyImageText
    assert family_class(config_directory(tmp_path, {"model_type": "qwen3"})) is TextOnly


def test_an_adapter_beside_a_models_config_is_not_applied_unasked(checkpoint):
    family = load_family(Model(path=str(checkpoint)))
    save_adapter(tiny_policy(checkpoint, noise=0.5), checkpoint)
    for load in (
        lambda: load_family(Model(path=str(checkpoint))),
        lambda: load_weights(family, torch.float32, torch.device("cpu")),
        lambda: family_class(checkpoint),
    ):
        with pytest.raises(ModelError, match=r"adapter_config\.json beside its config\.json"):
            load()


def add_tokens(checkpoint: Path, *tokens: str, special: bool = False) -> int:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    before = len(tokenizer)
    tokenizer.add_tokens([AddedToken(token, special=special) for token in tokens])
    tokenizer.save_pretrained(checkpoint)
    return before


def test_more_tokens_than_embeddings_are_refused_with_both_numbers(checkpoint):
    before = add_tokens(checkpoint, "<|part_a|>", "<|part_b|>")
    with pytest.raises(ModelError) as error:
        load_family(Model(path=str(checkpoint)))
    assert f"its tokenizer has {before + 2} tokens, but its model only {before} embeddings" in str(error.value)
    assert "none for <|part_a|>, <|part_b|>" in str(error.value)


def test_more_embeddings_than_tokens_are_padding(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"]["vocab_size"] += 64
    (checkpoint / "config.json").write_text(json.dumps(config))
    add_tokens(checkpoint, "<|part_a|>", "<|part_b|>")
    assert load_family(Model(path=str(checkpoint))).vocabulary_size == config["text_config"]["vocab_size"]


def test_a_special_token_without_an_embedding_is_refused_in_the_row_that_has_it(checkpoint):
    before = add_tokens(checkpoint, "<|part_a|>", special=True)
    family = load_family(Model(path=str(checkpoint)))
    assert token_ids(family, "seven", ())
    with pytest.raises(DataError, match=rf"token '<\|part_a\|>', number {before}, but the model has only {before} emb"):
        token_ids(family, "<|part_a|>seven", ())


def test_code_of_the_checkpoints_own_is_refused(tmp_path):
    config = {"model_type": "qwen2_vl", "auto_map": {"AutoModel": "modeling.Model"}}
    with pytest.raises(ModelError, match=r"run code from the checkpoint \(auto_map\), which tiercel never"):
        family_class(config_directory(tmp_path, config))


def test_ovis2_in_its_authors_form_names_the_converted_one(tmp_path):
    config = {"model_type": "ovis", "auto_map": {"AutoConfig": "configuration_ovis.OvisConfig"}}
    with pytest.raises(ModelError) as error:
        family_class(config_directory(tmp_path, config))
    assert "thisisiron/Ovis2-2B-hf" in str(error.value)
    assert "convert_ovis2_weights_to_hf.py" in str(error.value)


def test_no_config(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_family(Model(path=str(tmp_path)))


@pytest.mark.parametrize("text", ("{", ""))
def test_a_config_that_is_not_json(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match="is not JSON"):
        family_class(tmp_path)


def test_a_directory_is_taken_as_it_is(checkpoint):
    assert resolve(Model(path=str(checkpoint))) == checkpoint


def test_a_name_that_cannot_be_fetched_says_so():
    # offline, with nothing of that name cached; a hub that can be reached answers that there is no such model
    with pytest.raises((ModelError, EnvironmentProblem), match=r"model\.path: no-such-owner/no-such-model"):
        resolve(Model(path="no-such-owner/no-such-model"))
    with pytest.raises(ModelError, match=r"model\.path: ~nobody-here/m is neither a directory nor a model"):
        resolve(Model(path="~nobody-here/m"))
    with pytest.raises(ModelError, match=r"teacher\.path: too/many/parts is neither a directory nor a model"):
        resolve(Model(path="too/many/parts"), "teacher.path")


ANSWER: Any = SimpleNamespace(headers={}, request=None, status_code=403)


@pytest.mark.parametrize(
    ("fault", "said"),
    (
        (GatedRepoError("403 Client Error.", response=ANSWER), "HF_TOKEN"),
        (
            HfHubHTTPError("404 Client Error.\n\nRevision Not Found", response=ANSWER),
            "404 Client Error. Revision Not Found",
        ),
        (Exception("407 Proxy Authentication Required"), "407 Proxy"),  # of a class that does not say what it is
    ),
)
def test_each_fault_of_a_hub_is_told_as_what_it_is(monkeypatch, fault, said):
    def fail(*words, **options):
        raise fault

    monkeypatch.setattr("tiercel.models.weights.hub.snapshot_download", fail)
    with pytest.raises(EnvironmentProblem, match=said):
        resolve(Model(path="owner/name"))


def test_a_hub_that_does_not_answer_is_told_with_the_other_ways(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(EnvironmentProblem, match=r"could not be fetched: .*\n.*HF_ENDPOINT.*hub: modelscope"):
        resolve(Model(path="no-such-owner/no-such-model"), files=("config.json",))


def without_template(checkpoint: Path) -> Path:
    (checkpoint / "chat_template.jinja").unlink(missing_ok=True)
    edit(checkpoint / "tokenizer_config.json", chat_template=None)
    return checkpoint


def test_no_chat_template(checkpoint):
    with pytest.raises(ModelError, match=r"has no chat template; set data\.template to a file that has one"):
        load_family(Model(path=str(without_template(checkpoint))))


def test_a_template_file_takes_the_place_of_the_checkpoints(checkpoint, tmp_path):
    file = tmp_path / "mine.jinja"
    text = "{% for turn in messages %}{% for part in turn.content %}{{ part.text }}ü{% endfor %}{% endfor %}"
    file.write_text(text)
    model = Model(path=str(checkpoint))
    assert load_family(model, str(file)).checkpoint.chat_template == text
    assert load_family(model).checkpoint.chat_template.startswith("{% for message in messages %}<|im_start|>")
    assert load_family(Model(path=str(without_template(checkpoint))), str(file)).checkpoint.chat_template


def test_a_processors_template_is_read_where_the_tokenizer_has_none(checkpoint):
    (without_template(checkpoint) / "chat_template.json").write_text('{"chat_template": "{{ messages }}"}')
    assert load_family(Model(path=str(checkpoint))).checkpoint.chat_template == "{{ messages }}"


def test_a_processors_template_comes_before_the_tokenizers(checkpoint):
    """A tokenizer may still have the template of the language model that the checkpoint began as."""
    written = load_family(Model(path=str(checkpoint))).checkpoint.chat_template
    (without_template(checkpoint) / "chat_template.json").write_text(json.dumps({"chat_template": written}))
    edit(checkpoint / "tokenizer_config.json", chat_template="{{ messages[0].content }}")
    assert load_family(Model(path=str(checkpoint))).checkpoint.chat_template == written
    (checkpoint / "chat_template.jinja").write_text(written + "{# newer #}")
    assert load_family(Model(path=str(checkpoint))).checkpoint.chat_template == written + "{# newer #}"


def test_a_byte_order_mark_is_no_part_of_a_template(checkpoint, tmp_path):
    written = load_family(Model(path=str(checkpoint))).checkpoint.chat_template
    for file in (tmp_path / "mine.jinja", without_template(checkpoint) / "chat_template.jinja"):
        file.write_text(written, encoding="utf-8-sig")
    for template in (str(tmp_path / "mine.jinja"), None):
        assert load_family(Model(path=str(checkpoint)), template).checkpoint.chat_template == written


def test_end_tokens_are_the_tokenizers_and_the_generation_configs(checkpoint):
    family = load_family(Model(path=str(checkpoint)))
    end, pad = family.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert family.checkpoint.end_token_ids == (end,)
    for listed in (pad, [pad], [end, pad], [pad, end, pad]):
        edit(checkpoint / "generation_config.json", eos_token_id=listed)
        assert load_family(Model(path=str(checkpoint))).checkpoint.end_token_ids == (end, pad)
    (checkpoint / "generation_config.json").unlink()
    assert load_family(Model(path=str(checkpoint))).checkpoint.end_token_ids == (end,)


def test_no_end_token_is_refused(checkpoint):
    edit(checkpoint / "generation_config.json", eos_token_id=None)
    edit(checkpoint / "tokenizer_config.json", eos_token=None)
    (checkpoint / "special_tokens_map.json").unlink(missing_ok=True)
    with pytest.raises(ModelError, match="does not name an end token"):
        load_family(Model(path=str(checkpoint)))


def test_pixels_of_the_recipe_take_the_place_of_the_checkpoints(checkpoint):
    assert load_family(Model(path=str(checkpoint))).plan_image((200, 200)).processed_size == (112, 112)
    small = load_family(Model(path=str(checkpoint), max_pixels=56 * 56))
    assert small.plan_image((200, 200)).processed_size == (56, 56)
    large = load_family(Model(path=str(checkpoint), min_pixels=84 * 84))
    assert large.plan_image((28, 28)).processed_size == (84, 84)


@pytest.mark.parametrize("name", ("qwen2_5_vl", "qwen3_vl"))
def test_pixels_beyond_the_checkpoints_other_limit_are_refused(tiny_checkpoints, name):
    """The checkpoint's limits are 784 and 12544; a small picture would be enlarged above model.max_pixels."""
    path = str(tiny_checkpoints[name])
    words = r"model.max_pixels: is 783, .* at least 784 pixels; set model.min_pixels too, to 783 or less"
    with pytest.raises(ModelError, match=f"^{words}"):
        load_family(Model(path=path, max_pixels=783))
    words = r"model.min_pixels: is 12545, .* at most 12544 pixels; set model.max_pixels too, to 12545 or more"
    with pytest.raises(ModelError, match=f"^{words}"):
        load_family(Model(path=path, min_pixels=12545))
    for limits in ({"max_pixels": 784}, {"min_pixels": 12544}, {"min_pixels": 100, "max_pixels": 783}):
        family = load_family(Model(path=path, **limits))
        assert family.plan_image((100, 100)).token_count >= 1


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_weights_are_frozen_in_the_dtype_asked_for(tiny_checkpoints, dtype):
    family = load_family(Model(path=str(tiny_checkpoints["qwen2_vl"])))
    model = load_weights(family, dtype, torch.device("cpu"))
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training


def refused(checkpoint: Path, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        load_weights(load_family(Model(path=str(checkpoint))), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"\x80\x02\xff", b"[]", b"[" * 100_000])
def test_files_that_hold_no_json_object_are_named(checkpoint, name, content):
    (checkpoint / name).write_bytes(content)
    refused(checkpoint, name.replace(".", r"\."))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"])
def test_a_tokenizer_or_processor_that_cannot_be_read_is_refused(checkpoint, name):
    (checkpoint / name).write_bytes(b"cos\nsystem\n")
    refused(checkpoint, f"{checkpoint}: config, tokenizer or image processor cannot be read")


def test_a_tokenizers_own_code_is_neither_run_nor_asked_about(checkpoint, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *prompt: pytest.fail("it asks"))
    own = {"AutoTokenizer": ["code.Slow", "code.Fast"]}
    edit(checkpoint / "tokenizer_config.json", auto_map=own, tokenizer_class="Unknown")
    (checkpoint / "code.py").write_text("raise SystemExit('code from the checkpoint was run')")
    try:
        load_family(Model(path=str(checkpoint)))
    except ModelError as error:
        assert "tokenizer" in str(error)


def test_a_template_file_that_is_no_text_is_named(checkpoint, tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_bytes(b"\x80\x02")
    with pytest.raises(ModelError, match=r"data\.template: .*mine\.jinja cannot be read"):
        load_family(Model(path=str(checkpoint)), str(file))


def test_weights_that_are_no_safetensors_are_refused(checkpoint):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(b"\x80\x02" * 50)
    refused(checkpoint, "its weights cannot be read")
    weights.rename(checkpoint / "pytorch_model.bin")
    refused(checkpoint, "its weights cannot be read")


def test_weights_that_lack_a_tensor_or_have_one_of_another_shape_are_refused(checkpoint):
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("layers.0.mlp.up_proj.weight"))
    save_file({key: value for key, value in tensors.items() if key != name}, file, metadata={"format": "pt"})
    refused(checkpoint, r"has no weights for .*layers\.0\.mlp\.up_proj\.weight, and transformers would make random")
    save_file(tensors | {name: tensors[name][1:].clone()}, file, metadata={"format": "pt"})
    rows, columns = tensors[name].shape
    refused(
        checkpoint,
        rf"up_proj\.weight has shape \[{rows - 1}, {columns}\], but by .* it should be \[{rows}, {columns}\]",
    )


@pytest.mark.parametrize("name", ["pytorch_model.bin", "../model.safetensors", 7])
def test_an_index_may_name_only_safetensors_beside_it(checkpoint, name):
    index = {"metadata": {}, "weight_map": {"lm_head.weight": name}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(checkpoint, r"index\.json names .*; weights are read only from \.safetensors files in the same")


OUT_OF_MEMORY = (
    MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory: 5 bytes"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    OSError("unable to mmap 256000658256 bytes from file <model.safetensors>: Cannot allocate memory (12)"),
)


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_weights_too_large_for_memory_are_named_with_a_remedy(checkpoint, monkeypatch, error):
    def fail(*given, **options):
        raise error

    family = load_family(Model(path=str(checkpoint)))
    monkeypatch.setattr(AutoModelForImageTextToText, "from_pretrained", fail)
    with pytest.raises(ModelError) as caught:
        load_weights(family, torch.float32, torch.device("cpu"))
    said = str(caught.value)
    assert said.startswith(f"{checkpoint}: memory ran out while it was loaded: ")
    assert "its files have 0.0 GB; the largest tensor, " in said and "of model.safetensors, has 0.0 GB" in said
    assert "narrower model.dtype" in said and "train.strategy: fsdp2" in said


def test_a_file_too_large_for_memory_is_named(tmp_path, monkeypatch):
    save_file({"small": torch.zeros(2), "large": torch.zeros(30_000_000)}, tmp_path / "adapter.safetensors")
    monkeypatch.setattr(checkpoint_files, "load_file", lambda file: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(
        ModelError, match=r"have 0\.1 GB; the largest tensor, large of adapter\.safetensors, has 0\.1 GB"
    ):
        checkpoint_files.read_tensors(tmp_path / "adapter.safetensors")
    (tmp_path / "adapter.safetensors").write_bytes(b"no header")
    with pytest.raises(ModelError, match="memory ran out while it was loaded: MemoryError\nfree some memory"):
        checkpoint_files.read_tensors(tmp_path / "adapter.safetensors")


def test_a_checkpoint_whose_pictures_are_cut_into_crops_is_refused(tiny_checkpoints, tmp_path):
    path = Path(shutil.copytree(tiny_checkpoints["gemma3"], tmp_path / "model"))
    edit(path / "preprocessor_config.json", do_pan_and_scan=True)
    with pytest.raises(ModelError, match="do_pan_and_scan: true"):
        load_family(Model(path=str(path)))


def change_weights(checkpoint: Path, change) -> None:
    save_file(change(load_file(checkpoint / WHOLE)), checkpoint / WHOLE, metadata={"format": "pt"})


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_weights_that_are_not_finite_are_refused(checkpoint, value):
    change_weights(checkpoint, lambda weights: weights | {DOWN: weights[DOWN].index_fill(0, torch.tensor([3]), value)})
    family = load_family(Model(path=str(checkpoint)))
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj\.weight holds NaN or infinity"):
        load_weights(family, torch.float32, torch.device("cpu"))


def test_sums_that_overflow_are_no_fault(tmp_path):
    require_finite({"large": torch.full((8,), 3e38), "half": torch.full((9,), 6e4, dtype=torch.float16)}, tmp_path)


@pytest.mark.parametrize(("kind", "said"), ((torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")))
@pytest.mark.parametrize("device", ("cpu", "meta"))
def test_weights_that_need_a_scale_are_refused(checkpoint, kind, said, device):
    change_weights(checkpoint, lambda weights: weights | {DOWN: weights[DOWN].to(kind)})
    family = load_family(Model(path=str(checkpoint)))
    with pytest.raises(ModelError, match=f"its weight {DOWN} is stored as {said}, which means nothing without a scale"):
        load_weights(family, torch.float32, torch.device(device))


@pytest.mark.parametrize("device", ("cpu", "meta"))
@pytest.mark.parametrize(
    "name",
    (
        "model.layers.2.mlp.down_proj.weight",  # one more layer than the config has
        "model.layers.0.mlp.down_proj.bias",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.0.self_attn.q_norm.weight",
    ),
)
def test_weights_of_the_models_layers_without_a_place_are_refused(checkpoint, name, device):
    change_weights(checkpoint, lambda weights: weights | {name: torch.ones(3)})
    family = load_family(Model(path=str(checkpoint)))
    with pytest.raises(ModelError) as error:
        load_weights(family, torch.float32, torch.device(device))
    said = name.replace("model.layers", "model.language_model.layers")
    assert f"its files have a weight {said} that does not exist in the model of its config.json" in str(error.value)


def test_weights_of_parts_that_the_architecture_lacks_are_left(checkpoint):
    more = {"mtp.layers.0.weight": torch.ones(3), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    change_weights(checkpoint, lambda weights: weights | more)
    load_weights(load_family(Model(path=str(checkpoint))), torch.float32, torch.device("cpu"))


def test_two_sets_of_weights_are_refused(checkpoint):
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}))
    with pytest.raises(ModelError, match="two sets of weights"):
        load_weights(load_family(Model(path=str(checkpoint))), torch.float32, torch.device("cpu"))
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": WHOLE}}))
    load_weights(load_family(Model(path=str(checkpoint))), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("token", (99999, -1, "<|im_end|>", True, 1.5))
def test_an_end_token_that_is_none_is_refused(checkpoint, token):
    edit(checkpoint / "generation_config.json", eos_token_id=[0, token])
    with pytest.raises(ModelError, match=f"eos_token_id {re.escape(repr(token))} is not a token"):
        load_family(Model(path=str(checkpoint)))


@pytest.mark.parametrize("token", (3, 99999))
@pytest.mark.parametrize("name", ("qwen2_5_vl", "internvl", "llava_onevision", "gemma3"))
def test_a_picture_token_that_is_another_is_refused(tiny_checkpoints, tmp_path, name, token):
    place = Path(shutil.copytree(tiny_checkpoints[name], tmp_path / "checkpoint"))
    key = "image_token_index" if "image_token_index" in (place / "config.json").read_text() else "image_token_id"
    edit(place / "config.json", **{key: token})
    with pytest.raises(ModelError, match=f"config.json names token {token} for pictures, "):
        load_family(Model(path=str(place)))


def test_a_config_of_another_architecture_is_refused(checkpoint):
    edit(checkpoint / "config.json", model_type="bert")
    with pytest.raises(ModelError, match=r"config\.json does not describe a model of "):
        load_family(Model(path=str(checkpoint)))
