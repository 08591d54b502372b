"""Read the files of a checkpoint's directory: JSON and safetensors, and refuse what they may not contain."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from tiercel.errors import ModelError
from tiercel.models.weights.memory_errors import is_out_of_memory, memory_to_load

SHOWN_NAMES = 3
ADAPTER_CONFIG = "adapter_config.json"
SCALED = ("I8", "U8", "F8", "F4", "F6")  # prefixes of a header's dtypes that need a scale
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"  # lists the files if the weights are in several


def require_no_adapter(path: Path) -> None:
    """Raise ModelError if a model's directory also has an adapter, which transformers would add to the model
    unasked."""
    if (path / ADAPTER_CONFIG).is_file():
        raise ModelError(
            f"{path} has {ADAPTER_CONFIG} beside its config.json, and transformers would add that adapter to the "
            "model; move the adapter's files into a directory of their own and name it where you need it (lora.init, "
            "--adapter, the adapter of a teacher or a reward model)"
        )


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file to the CPU. Raises ModelError if it cannot be read or does not fit into
    memory."""
    with memory_to_load(file, "free some memory, or put the right file there"):
        return _tensors(file)


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"{file} cannot be read as a safetensors file: {error}") from error


def require_finite(tensors: Mapping[str, Tensor], source: Path) -> None:
    """Raise ModelError if weights need a scale, or contain a number that is not finite, because every output would be
    meaningless. `source` is where they were read from."""
    if odd := sorted(name for name, each in tensors.items() if not each.is_floating_point() or each.element_size() < 2):
        raise _without_scale(source, odd[0], str(tensors[odd[0]].dtype).removeprefix("torch."))
    # A sum does not need memory of the tensor's size; a tensor whose sum overflows is checked again.
    unsure = {name: each for name, each in tensors.items() if not torch.isfinite(each.sum(dtype=torch.float32))}
    if odd := [name for name, each in unsure.items() if not torch.isfinite(each.float()).all()]:
        raise ModelError(
            f"{source}: {named_few(odd)} {'holds' if len(odd) == 1 else 'hold'} NaN or infinity, so every output "
            "would be NaN; use an earlier copy, from before its training diverged"
        )


def _without_scale(source: Path, name: str, kind: str) -> ModelError:
    return ModelError(
        f"{source}: its weight {name} is stored as {kind}, which means nothing without a scale; use the weights in "
        "bfloat16, float16 or float32"
    )


def named_few(names: Collection[str]) -> str:
    """Return the first few names in order, and how many more there are."""
    shown = sorted(names)[:SHOWN_NAMES]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def read_config(path: Path) -> dict[str, Any]:
    """Read config.json. Raises ModelError if there is none or it cannot be read."""
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"model.path: {path} has no config.json")
    return read_json(file)


def require_no_code(path: Path, config: dict[str, Any]) -> None:
    """Raise ModelError if config.json asks to run code of the checkpoint."""
    if "auto_map" in config:
        raise ModelError(
            f"{path}: config.json asks to run code from the checkpoint (auto_map), which tiercel never does; use a "
            "checkpoint in transformers' own format"
        )


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file of the checkpoint. Raises ModelError if the file does not contain one."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} is JSON, but not a JSON object")
    return content


def require_safetensors(directory: Path) -> None:
    """Raise ModelError if an index names files of another kind or in another directory."""
    if not (directory / INDEX).is_file():
        return
    files = read_json(directory / INDEX).get("weight_map")
    named = list(files.values()) if isinstance(files, dict) else [files]
    for file in named:
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(
                f"{directory / INDEX} names {file!r}; weights are read only from .safetensors files in the same "
                "directory"
            )
    if (directory / WHOLE).is_file() and WHOLE not in named:
        raise ModelError(
            f"{directory} has two sets of weights: {WHOLE}, and {INDEX}, which names other files; remove the one "
            "that you do not want"
        )


def require_plain_numbers(directory: Path) -> None:
    """Raise ModelError if a file of unquantised weights has some that need a scale. Only headers are read."""
    for file in sorted(directory.glob("model*.safetensors")):
        try:
            with safe_open(file, "pt") as tensors:
                kinds = {name: str(tensors.get_slice(name).get_dtype()) for name in tensors.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            continue  # loading the weights will report it
        if odd := sorted(name for name, kind in kinds.items() if kind.startswith(SCALED)):
            raise _without_scale(file, odd[0], kinds[odd[0]])
