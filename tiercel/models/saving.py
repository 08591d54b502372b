"""Write and read the trained weights: an adapter directory, or a whole model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor

from tiercel.errors import ModelError
from tiercel.models.companions import write_companions
from tiercel.models.family import Family, HuggingFaceModel
from tiercel.models.loading import read_tensors
from tiercel.models.policy import WHOLE_FILE, Policy, read_whole
from tiercel.models.value_head import NAME, value_head


def save_trained(policy: Policy, directory: Path, weights: Mapping[str, Tensor] | None = None) -> Path:
    """Write `directory`/adapter, or `directory`/model in full fine-tuning, and return its path. `weights`: whole
    tensors by their names in the policy's model, for strategies that leave only parts of them in the model."""
    if policy.peft is None:
        save_model(policy.family, policy.model, directory / "model", weights)
        return directory / "model"
    save_adapter(policy, directory / "adapter", weights)
    return directory / "adapter"


def save_adapter(
    policy: Policy,
    directory: Path,
    weights: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write PEFT's two files, and a third where some weights are trained whole. Equal weights give equal bytes.
    `dtype`: of the adapter, which is trained in float32."""
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
    config["base_model_name_or_path"] = policy.family.checkpoint.path
    config["inference_mode"] = True
    text = json.dumps(config, indent=2, sort_keys=True, default=_plain)
    (directory / "adapter_config.json").write_text(text, encoding="utf-8")


def restore_adapter(policy: Policy, directory: Path) -> None:
    """Copy a saved adapter's weights into the policy. Raises ModelError where the names differ."""
    assert policy.peft is not None
    tensors = read_tensors(directory / "adapter_model.safetensors")
    own = get_peft_model_state_dict(policy.peft, adapter_name="default", save_embedding_layers=False)
    if odd := sorted(set(tensors) ^ set(own)):
        raise ModelError(f"{directory}: the adapter's layers are not the policy's, such as {odd[0]}")
    for name, tensor in tensors.items():
        own[name].copy_(tensor)  # it shares the memory of the policy's
    if others := sorted(read_whole(policy.model, directory) ^ set(policy.whole_parameters())):
        raise ModelError(
            f"{directory}: its run trained other weights whole than the policy does, such as {others[0]}; "
            "make freeze equal to that run's"
        )


def save_model(
    family: Family, model: HuggingFaceModel, directory: Path, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write a whole Hugging Face directory: weights, config, tokenizer, processors; of a reward model the value head in
    a file of its own. `weights`: instead of the model's."""
    directory.mkdir(parents=True, exist_ok=True)
    if value_head(model) is not None:
        weights = dict(model.state_dict() if weights is None else weights)
        own = {name: weights.pop(name).float().cpu() for name in tuple(weights) if name.startswith(f"{NAME}.")}
        save_file(own, directory / WHOLE_FILE)
    family.save(model, directory, weights)
    write_companions(family, directory)


def _plain(value: Any) -> Any:
    """Convert what JSON does not know in PEFT's config. Sets are sorted, because their order differs between
    processes."""
    return sorted(value) if isinstance(value, set | frozenset) else str(getattr(value, "value", value))
