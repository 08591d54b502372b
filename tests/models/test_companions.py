"""A saved model comes with the template that was trained, the limits of its pictures, and the checkpoint's files."""

import json
import shutil
import stat
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tiercel.config.schema import Model
from tiercel.models.families.loading import load_family
from tiercel.models.weights.loading import load_weights
from tiercel.models.weights.saving import FILES, _keep_older_names, name_of_base, save_model, write_companions
from tiercel.writing import let_others_read

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)


def companions(directory: Path) -> dict[str, bytes]:
    return {name: (directory / name).read_bytes() for name in FILES if (directory / name).is_file()}


def written(checkpoint: Path, target: Path, template: str | None = None, **limits: int) -> Path:
    target.mkdir()
    write_companions(load_family(Model(path=str(checkpoint), dtype="float32", **limits), template), target)
    return target


@pytest.mark.parametrize("name", ("qwen2_5_vl", "internvl", "gemma3"))
def test_without_a_word_of_the_recipe_they_are_the_checkpoints_bytes(tiny_checkpoints, tmp_path, name):
    checkpoint = tiny_checkpoints[name]
    assert companions(written(checkpoint, tmp_path / "out")) == companions(checkpoint)


@pytest.mark.parametrize("is_flat", (False, True))
@pytest.mark.parametrize(
    ("name", "older"),
    (
        ("qwen2_5_vl", {"rope_theta": 5e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}),
        (
            "gemma3",
            {"rope_theta": 2e6, "rope_local_base_freq": 3e4, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        ),
    ),
)
def test_rotary_settings_have_their_older_names_too(tiny_checkpoints, tmp_path, name, older, is_flat):
    """Readers for transformers 4 know no other names, and transformers 5 reads the same from both. The published config
    of Qwen2.5-VL is flat, but the saved one is not."""
    if is_flat and name != "qwen2_5_vl":
        pytest.skip("its published config is not flat")
    checkpoint = tmp_path / "published"
    shutil.copytree(tiny_checkpoints[name], checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    text = config.get("text_config", config)
    for key in ("rope_parameters", "dtype"):
        text.pop(key, None)
        config.pop(key, None)
    text |= older
    if is_flat:
        config = {**config.pop("text_config"), **config}
    (checkpoint / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}))
    family = load_family(Model(path=str(checkpoint), dtype="float32"))
    save_model(family, load_weights(family, torch.bfloat16, torch.device("cpu")), tmp_path / "out")
    saved = json.loads((tmp_path / "out/config.json").read_text())
    inner = saved.get("text_config", saved)
    assert {key: inner[key] for key in older} == older and saved["torch_dtype"] == saved["dtype"] == "bfloat16"
    read, was = (AutoConfig.from_pretrained(place).get_text_config() for place in (tmp_path / "out", checkpoint))
    assert read.rope_parameters == was.rope_parameters


@pytest.mark.parametrize("name", ("qwen2_5_vl", "internvl", "gemma3"))
def test_the_template_of_the_recipe_is_the_one_that_is_read(tiny_checkpoints, tmp_path, name):
    own = tmp_path / "own.jinja"
    own.write_text(TEMPLATE)
    target = written(tiny_checkpoints[name], tmp_path / "out", str(own))
    assert AutoTokenizer.from_pretrained(target).chat_template == TEMPLATE


def test_a_template_in_older_files_does_not_stay_beside_it(tiny_checkpoints, tmp_path):
    checkpoint = tmp_path / "old"
    checkpoint.mkdir()
    for file in tiny_checkpoints["qwen2_5_vl"].iterdir():
        (checkpoint / file.name).write_bytes(file.read_bytes())
    (checkpoint / "chat_template.jinja").unlink()
    (checkpoint / "chat_template.json").write_text(json.dumps({"chat_template": "old"}))
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "older"}))
    (checkpoint / "processor_config.json").write_text(json.dumps({"chat_template": "oldest", "kept": 1}))
    own = tmp_path / "own.jinja"
    own.write_text(TEMPLATE)
    target = written(checkpoint, tmp_path / "out", str(own))
    assert AutoTokenizer.from_pretrained(target).chat_template == TEMPLATE
    assert not (target / "chat_template.json").exists()
    assert json.loads((target / "processor_config.json").read_text()) == {"kept": 1}


@pytest.mark.parametrize("limits", ({"max_pixels": 6272}, {"min_pixels": 1568, "max_pixels": 6272}))
def test_limits_of_pictures_are_those_of_the_run(tiny_checkpoints, tmp_path, limits):
    target = written(tiny_checkpoints["qwen2_5_vl"], tmp_path / "out", **limits)
    size = json.loads((target / "preprocessor_config.json").read_text())["size"]
    assert size == {"shortest_edge": limits.get("min_pixels", 784), "longest_edge": 6272}
    read = Qwen2VLImageProcessorPil.from_pretrained(target).size
    assert (read.shortest_edge, read.longest_edge) == (size["shortest_edge"], 6272)


PUBLISHED = {"min_pixels": 3136, "max_pixels": 12845056}


@pytest.mark.parametrize("size", (None, PUBLISHED), ids=("Qwen2.5-VL", "Qwen2-VL"))
@pytest.mark.parametrize("file", ("preprocessor_config.json", "processor_config.json"))
@pytest.mark.parametrize("limits", ({"max_pixels": 6272}, {"min_pixels": 1568, "max_pixels": 6272}))
def test_limits_are_written_into_files_as_published(tiny_checkpoints, tmp_path, size, file, limits):
    checkpoint = Path(shutil.copytree(tiny_checkpoints["qwen2_5_vl"], tmp_path / "published"))
    config = json.loads((checkpoint / "preprocessor_config.json").read_text())
    del config["size"]
    config |= PUBLISHED | ({} if size is None else {"size": size})
    (checkpoint / "preprocessor_config.json").unlink()
    nested = {"image_processor": config} if file == "processor_config.json" else config
    (checkpoint / file).write_text(json.dumps(nested))
    target = written(checkpoint, tmp_path / "out", **limits)
    found = json.loads((target / file).read_text())
    found = found["image_processor"] if file == "processor_config.json" else found
    expected = PUBLISHED | limits
    assert found == config | expected | ({} if size is None else {"size": expected})
    read = Qwen2VLImageProcessorPil.from_pretrained(target).size
    assert (read.shortest_edge, read.longest_edge) == (expected["min_pixels"], expected["max_pixels"])


def test_safetensors_that_only_their_owner_may_read_get_the_mode_of_other_files(tmp_path):
    (tmp_path / "inside").mkdir()
    plain, closed = tmp_path / "plain", tmp_path / "inside/model.safetensors"
    plain.write_text("")
    closed.write_text("")
    closed.chmod(0o600)
    let_others_read(tmp_path)
    assert stat.S_IMODE(closed.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_an_adapter_names_its_base_as_the_hub_does():
    cached = "/home/me/.cache/huggingface/hub/models--Qwen--Qwen2.5-VL-3B-Instruct/snapshots/66285546d2b8"
    assert name_of_base(cached) == "Qwen/Qwen2.5-VL-3B-Instruct"
    assert name_of_base("/data/models/mine") == "/data/models/mine"


def test_older_names_that_would_be_read_as_something_else_are_left_out(tiny_checkpoints, tmp_path):
    checkpoint = tiny_checkpoints["qwen2_5_vl"]
    for place in ("published", "out"):
        shutil.copytree(checkpoint, tmp_path / place)
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"] |= {"rope_theta": 7.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    (tmp_path / "published/config.json").write_text(json.dumps(config))
    _keep_older_names(tmp_path / "published", tmp_path / "out")
    assert (tmp_path / "out/config.json").read_bytes() == (checkpoint / "config.json").read_bytes()
