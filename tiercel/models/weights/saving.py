"""Writing and reading of the trained weights, and of the files next to them: tokenizer, processors, generation
config."""

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

from tiercel.errors import ModelError
from tiercel.models.families.base import Family, HuggingFaceModel
from tiercel.models.layers.value_head import NAME, value_head
from tiercel.models.policy import WHOLE_FILE, Policy, read_whole
from tiercel.models.weights.checkpoint_files import read_tensors

GENERATION = "generation_config.json"
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "sentencepiece.bpe.model",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    GENERATION,
)
TEMPLATE = "chat_template.jinja"
OWN_TEMPLATE = "chat_template"  # a key of older checkpoints' files
EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}  # the older and the newer name of a limit
# Keys of config.json that transformers 5 has replaced by `rope_parameters`
OLDER_ROTARY = re.compile("rope_(?!parameters).*|partial_rotary_factor|rotary_.*|(global|local)_rope_theta")
CACHED = re.compile(r".*/models--([^/]+)--([^/]+)/snapshots/([0-9a-f]+)/?")  # a model in the hub's cache
Config = dict[str, Any]


def write_companions(family: Family, directory: Path) -> None:
    """Write the files that accompany the weights of a family's model."""
    copy_files(Path(family.checkpoint.path), directory)
    _change(directory / GENERATION, lambda config: _stop_at(config, family.checkpoint.end_token_ids))
    if family.checkpoint.chat_template != family.tokenizer.chat_template:
        _write_template(family.checkpoint.chat_template, directory)
    if family.min_pixels is not None or family.max_pixels is not None:
        limited = {"min_pixels": family.min_pixels, "max_pixels": family.max_pixels}
        given = {name: value for name, value in limited.items() if value is not None}
        _change(directory / "preprocessor_config.json", lambda config: _limit(config, given))
        _change(directory / "processor_config.json", lambda config: _limit(config.get("image_processor"), given))


def copy_files(source: Path, directory: Path) -> None:
    """Copy the files of tokenizer and processors, byte for byte."""
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _keep_older_names(source: Path, directory: Path) -> None:
    """Add the names of rotary settings and of the dtype that the checkpoint has and transformers 5 does not write.
    Readers for transformers 4 know no others, and would silently compute with another base. They are left out if
    transformers 5 would read them as something else."""
    file = directory / "config.json"
    plain, read = file.read_bytes(), _rotary(directory)
    published = json.loads((source / "config.json").read_text(encoding="utf-8"))
    _change(file, lambda config: _add_older_names(config, published))
    if _rotary(directory) != read:
        file.write_bytes(plain)


def _rotary(directory: Path) -> Any:
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    return getattr(config.get_text_config(), "rope_parameters", None)


def _add_older_names(config: Config, published: Config) -> None:
    decoder = config.get("text_config")
    # transformers 5 also moves the decoder's settings of published configs, such as Qwen2.5-VL's, into `text_config`.
    place = decoder if isinstance(decoder, dict) and "text_config" not in published else config
    for name, value in published.items():
        if isinstance(value, dict) and isinstance(own := config.get(name), dict) and name.endswith("_config"):
            _add_older_names(own, value)
        elif OLDER_ROTARY.fullmatch(name):
            place.setdefault(name, value)
    if "torch_dtype" in published and isinstance(config.get("dtype"), str):
        config["torch_dtype"] = config["dtype"]


def _write_template(template: str, directory: Path) -> None:
    """Write the template to the file that takes precedence, and remove it from the others."""
    (directory / TEMPLATE).write_text(template, encoding="utf-8")
    (directory / "chat_template.json").unlink(missing_ok=True)
    for name in ("tokenizer_config.json", "processor_config.json"):
        _change(directory / name, lambda config: config.pop(OWN_TEMPLATE, None))


def _stop_at(config: Config, end_token_ids: Sequence[int]) -> None:
    """Set the tokens at which transformers stops if some are missing, such as the end of a turn in a base model, which
    the run has taught. Without the key, transformers would not stop at all: save_pretrained writes such a file."""
    listed = config.get("eos_token_id")
    if not set(end_token_ids).issubset(listed if isinstance(listed, list) else [listed]):
        config["eos_token_id"] = list(end_token_ids)


def _limit(config: Config | None, limits: Config) -> None:
    """Set the limits of an image's pixels wherever an image processor's file has them, by either name."""
    if config is None:
        return
    size = config.get("size") or {}
    for name, limit in limits.items():
        edge = EDGES[name]
        size |= {key: limit for key in (name, edge) if key in size}
        if name in config or edge not in size:  # the published Qwen2.5-VL has no `size`
            config[name] = limit


def _change(file: Path, change: Callable[[Config], Any]) -> None:
    """Apply a change to a JSON file, if the file exists, and write it only if its content differs."""
    if not file.is_file():
        return
    text = file.read_text(encoding="utf-8")
    config = json.loads(text)
    before = json.dumps(config)
    change(config)
    if json.dumps(config) != before:
        file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_trained(policy: Policy, directory: Path, weights: Mapping[str, Tensor] | None = None) -> Path:
    """Write `directory`/adapter, or `directory`/model in full fine-tuning, and return its path. `weights` are whole
    tensors by their names in the policy's model, for strategies that leave only parts of them in the model."""
    if policy.peft is None:
        save_model(policy.family, policy.model, directory / "model", weights)
        return directory / "model"
    save_adapter(policy, directory / "adapter", weights)
    return directory / "adapter"


def name_of_base(path: str) -> str:
    """Return the hub's name of a model in its cache, so that an adapter can be loaded elsewhere; else the path."""
    found = CACHED.fullmatch(path)
    return path if found is None else f"{found[1]}/{found[2]}"


def save_adapter(
    policy: Policy,
    directory: Path,
    weights: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write PEFT's two files, and a third if some weights are trained whole. Equal weights give equal bytes. `dtype` is
    that of the written adapter, which is trained in float32."""
    assert policy.peft is not None
    directory.mkdir(parents=True, exist_ok=True)
    named = None if weights is None else {f"base_model.model.{name}": tensor for name, tensor in weights.items()}
    if whole := policy.whole_parameters():
        kept = {name: (whole if weights is None else weights)[name] for name in whole}
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in kept.items()}, directory / WHOLE_FILE)
    state = get_peft_model_state_dict(policy.peft, named, adapter_name="default", save_embedding_layers=False)
    tensors = {name: state[name].detach().to(dtype).cpu().contiguous() for name in sorted(state)}
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = dict(policy.peft.peft_config["default"].to_dict())
    config["base_model_name_or_path"] = name_of_base(policy.family.checkpoint.path)
    if (cached := CACHED.fullmatch(policy.family.checkpoint.path)) is not None:
        config["revision"] = cached[3]
    config["inference_mode"] = True
    text = json.dumps(config, indent=2, sort_keys=True, default=_plain)
    (directory / "adapter_config.json").write_text(text, encoding="utf-8")


def restore_adapter(policy: Policy, directory: Path) -> None:
    """Copy a saved adapter's weights into the policy. Raises ModelError if the names differ."""
    assert policy.peft is not None
    tensors = read_tensors(directory / "adapter_model.safetensors")
    own = get_peft_model_state_dict(policy.peft, adapter_name="default", save_embedding_layers=False)
    if odd := sorted(set(tensors) ^ set(own)):
        raise ModelError(f"{directory}: the adapter's layers differ from the policy's, such as {odd[0]}")
    for name, tensor in tensors.items():
        own[name].copy_(tensor)  # shares its memory with the policy's tensor
    if others := sorted(read_whole(policy.model, directory) ^ set(policy.whole_parameters())):
        raise ModelError(
            f"{directory}: its run trained different weights whole than the policy does, such as {others[0]}; set "
            "freeze as in that run"
        )


def save_model(
    family: Family, model: HuggingFaceModel, directory: Path, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write a whole Hugging Face directory: weights, config, tokenizer and processors, and a reward model's value head
    in a separate file. `weights` replace the model's."""
    directory.mkdir(parents=True, exist_ok=True)
    if value_head(model) is not None:
        weights = dict(model.state_dict() if weights is None else weights)
        own = {name: weights.pop(name).float().cpu() for name in tuple(weights) if name.startswith(f"{NAME}.")}
        save_file(own, directory / WHOLE_FILE)
    family.save(model, directory, weights)
    _keep_older_names(Path(family.checkpoint.path), directory)
    write_companions(family, directory)


def _plain(value: Any) -> Any:
    """Convert values in PEFT's config that JSON does not know. Sets are sorted, because their order differs between
    processes."""
    return sorted(value) if isinstance(value, set | frozenset) else str(getattr(value, "value", value))
