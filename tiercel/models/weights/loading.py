"""Load the weights of a checkpoint. Code of a checkpoint is never run."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import GenerationConfig

from tiercel.config.schema import Quantization
from tiercel.errors import ModelError
from tiercel.models.families.base import Family, HuggingFaceModel
from tiercel.models.layers.attention import route_attention
from tiercel.models.layers.dropout import switch_off_dropout
from tiercel.models.layers.experts import IMPLEMENTATION, mixtures
from tiercel.models.layers.quantized import is_quantized, loading_options, settle, stored_quantization
from tiercel.models.layers.rotary import keep_frequencies
from tiercel.models.layers.tower_attention import route_tower
from tiercel.models.weights.checkpoint_files import (
    named_few,
    read_config,
    require_finite,
    require_no_adapter,
    require_plain_numbers,
    require_safetensors,
)
from tiercel.models.weights.memory_errors import is_out_of_memory, memory_to_load

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SMALLER = (
    "use a narrower model.dtype, a smaller checkpoint or a machine with more memory, or share the model over several "
    "GPUs with train.strategy: fsdp2 (`tiercel plan` says what fits)"
)
BUFFERS = ("inv_freq", "position_ids")  # saved by older versions of transformers, although they are computed


def load_weights(
    family: Family,
    dtype: torch.dtype,
    device: torch.device,
    path: Path | None = None,
    quantize: Quantization | None = None,
) -> HuggingFaceModel:
    """Load the Hugging Face model in evaluation mode, with no trainable parameters. If `device` is meta, only the
    headers of the files are read. `path` is a directory with other weights than the checkpoint's. `quantize` is as
    model.quantize; a quantised checkpoint stays quantised. Raises ModelError if the weights are not readable
    safetensors files, do not match the config, or do not fit into memory."""
    directory = path or Path(family.checkpoint.path)
    require_no_adapter(directory)
    require_safetensors(directory)
    stored = stored_quantization(read_config(directory), str(directory))
    if stored and quantize and stored != quantize:
        raise ModelError(
            f"model.quantize: is {quantize}, but {directory} is already quantised, as {stored}; remove this key"
        )
    if stored is None:
        require_plain_numbers(directory)
    options = loading_options(family, quantize, dtype, device, is_stored=stored is not None)
    if device.type == "meta":
        options = {"device_map": "meta"}
    with memory_to_load(directory, SMALLER):
        return _loaded(family, dtype, device, directory, options)


def _loaded(
    family: Family, dtype: torch.dtype, device: torch.device, directory: Path, options: dict[str, Any]
) -> HuggingFaceModel:
    try:
        loaded: Any = family.model_class.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            output_loading_info=True,
            **options,
        )
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        if "scaled_dot_product_attention" in str(error):
            raise ModelError(
                f"{directory}: transformers computes {family.checkpoint.config.model_type} without "
                "scaled_dot_product_attention, which tiercel replaces with its own attention; use another model"
            ) from error
        raise ModelError(f"{directory}: its weights cannot be read: {error}") from error
    model: HuggingFaceModel
    model, found = loaded
    if missing := found["missing_keys"]:
        raise ModelError(
            f"{directory} has no weights for {named_few(missing)}, and transformers would make random ones; the "
            "files are incomplete, or config.json belongs to another model"
        )
    if others := sorted(found["mismatched_keys"]):
        name, there, here = others[0]
        raise ModelError(
            f"{directory}: its weight {name} has shape {list(there)}, but by config.json it should be {list(here)}; "
            "the files belong to another config.json"
        )
    more = () if is_quantized(model) else found["unexpected_keys"]  # quantised files keep scales next to the weights
    model.left_over = _require_all_placed(model, more, directory)
    model.requires_grad_(False)
    switch_off_dropout(model)
    if device.type != "meta":
        floats = ((name, each) for name, each in model.named_parameters() if each.is_floating_point())
        require_finite(dict(floats), directory)  # integers are quantised
    # The generation config is not used here, and transformers refuses to save some of the published ones.
    model.generation_config = GenerationConfig()
    head = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False  # or engines would not read the head of an export
    decoder: Any = family.language_model(model)
    route_attention(decoder)
    keep_frequencies(decoder)
    if any(mixture.uses_kernels for mixture in mixtures(model)):
        decoder.set_experts_implementation(IMPLEMENTATION)  # some whole models refuse it
    if tower := family.tower_of_spans(model):
        route_tower(tower)
    if is_quantized(model):
        settle(model, dtype)
        return model.eval()
    return model.to(device).eval()


def _require_all_placed(model: nn.Module, names: Iterable[str], directory: Path) -> tuple[str, ...]:
    """Return the names of weights for parts that the architecture does not have, such as heads for several tokens.
    Raises ModelError if others are left over: weights of layers that it has, or of additional layers."""
    modules = dict(model.named_modules())
    left_over = []
    for name in sorted(names):
        if name.rpartition(".")[2] in BUFFERS:
            continue
        parents = [".".join(name.split(".")[:count]) for count in range(1, name.count(".") + 1)]
        known = [modules[parent] for parent in parents if parent in modules]
        if known and (not any(known[-1].children()) or any(isinstance(each, nn.ModuleList) for each in known)):
            raise ModelError(
                f"{directory}: its files have a weight {name} that does not exist in the model of its config.json; "
                "the files belong to another config.json, or a merge was left unfinished"
            )
        left_over.append(name)
    return tuple(left_over)
