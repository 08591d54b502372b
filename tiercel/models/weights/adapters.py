"""Adapters from files: PEFT's config and weights, which are loaded into a model completely or refused."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, WeightTransform

from tiercel.errors import ModelError
from tiercel.models.families.base import Family, HuggingFaceModel
from tiercel.models.layers.quantized import is_quantized
from tiercel.models.weights.checkpoint_files import ADAPTER_CONFIG as CONFIG
from tiercel.models.weights.checkpoint_files import named_few, read_json, read_tensors, require_finite
from tiercel.models.weights.loading import load_weights
from tiercel.models.weights.memory_errors import is_out_of_memory, memory_to_load
from tiercel.models.weights.targets import adaptable_names, adapted_names

WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"
# Float32 weights by their names in the model: next to an adapter, those trained whole; next to a model, its value head.
WHOLE_FILE = "trained_whole.safetensors"
# Files in which LLaVA, its kin and ms-swift save weights of the model itself that were trained whole beside an adapter.
WHOLE_OF_OTHERS = ("non_lora*", "mm_projector.bin", "vit.safetensors")
PREFIX = "base_model.model."  # PEFT puts it before every name of the model
# The adapter's own name in the names of its weights, such as base_model.model.q_proj.lora_A.default.weight.
_NAME = re.compile(
    r"(?<=\.lora_A|\.lora_B)\.(?!weight$)([^.]+)(?=\.weight$)|(?<=\.lora_magnitude_vector)\.([^.]+)\.weight$"
)
# Keys that PEFT's own code computes from, and keys that only describe the adapter's origin.
UNDERSTOOD = {
    *("r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"),
    *("target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "peft_version"),
    *("inference_mode", "fan_in_fan_out", "init_lora_weights", "loftq_config", "eva_config", "corda_config"),
    *("lora_ga_config", "runtime_config", "megatron_core"),
}
# Other initialisations change the model's own weights too, and PEFT would do so once for each copy of the adapter.
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")


def read_adapter(model: HuggingFaceModel, directory: Path, dropout: float = 0.0) -> PeftModel:
    """Add the adapter of a directory to a model, trainable and with the given dropout. Weights and modules may have the
    names of published checkpoints, as before transformers 4.52. Raises ModelError if the adapter cannot be read, needs
    something that is not computed here, or does not fit the model."""
    config = adapter_config(directory)
    with memory_to_load(directory, "take an adapter of a lower rank, or a machine with more memory"):
        tensors = _of_one_adapter(read_tensors(directory / WEIGHTS), directory)
        require_finite(tensors, directory / WEIGHTS)
        _require_saved_whole(tensors, directory)
        _require_adapter_alone(tensors, directory)
        names = _Names(model)
        written = {names.in_model(name): name for name in tensors}
        if written.keys() != tensors.keys():
            config = names.rename(config)
        config.lora_dropout = dropout
        peft = _with_layers(model, config, directory)
        _fill(peft, {name: tensors[old] for name, old in written.items()}, written, directory)
    return peft


def adapter_config(directory: Path) -> LoraConfig:
    """Read the config of an adapter. Raises ModelError if there is none, or if it is of a kind that is not computed
    here."""
    if not (directory / CONFIG).is_file() or not (directory / WEIGHTS).is_file():
        if (directory / PICKLED).is_file():
            raise ModelError(
                f"{directory} has {PICKLED}, a pickle, which is never opened here; if you trust it, load the adapter "
                f"with PEFT and save it with save_pretrained, which writes {WEIGHTS}"
            )
        raise ModelError(f"{directory} is not an adapter: {CONFIG} or {WEIGHTS} is missing there")
    given = read_json(directory / CONFIG)
    if (kind := given.get("peft_type")) != "LORA":
        raise ModelError(
            f"{directory / CONFIG}: peft_type {kind!r} is not supported, only LORA; merge the adapter into its model "
            "with PEFT's merge_and_unload, and set model.path to that model"
        )
    known = {field.name: _default(field) for field in dataclasses.fields(LoraConfig)}
    for name, value in given.items():
        if name not in UNDERSTOOD and value != known.get(name) and value not in (None, False, "", [], {}):
            raise ModelError(
                f"{directory / CONFIG}: an adapter with {name} {value!r} is not supported; merge it into its model "
                "with PEFT's merge_and_unload, and set model.path to that model"
            )
    if (start := given.get("init_lora_weights")) not in PLAIN_STARTS:
        raise ModelError(
            f"{directory / CONFIG}: init_lora_weights {start!r} changes the model's own weights too; merge the "
            "adapter into its model with PEFT's merge_and_unload, and set model.path to that model"
        )
    _require_sizes(given, directory / CONFIG)
    config = _made({name: value for name, value in given.items() if name in known}, directory)
    config.init_lora_weights = True  # the weights follow
    config.task_type = "CAUSAL_LM"  # other types add modules of their own
    return config


def _require_sizes(given: Mapping[str, Any], file: Path) -> None:
    """Raise ModelError unless the ranks of a config are whole numbers above 0, and the numbers that scale the matrices
    above 0: with 0 an adapter would be loaded and have no effect."""
    for name, patterns, kind in (("r", "rank_pattern", int), ("lora_alpha", "alpha_pattern", (int, float))):
        by_layer = given.get(patterns) or {}
        if not isinstance(by_layer, dict):
            raise ModelError(f"{file}: {patterns} is {by_layer!r}, but must be an object with a number for each layer")
        found = {f"{patterns}[{layer!r}]": value for layer, value in by_layer.items()}
        for key, value in (found | ({name: given[name]} if name in given else {})).items():
            if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < math.inf:
                raise ModelError(
                    f"{file}: {key} is {value!r}, but must be a number above 0, and a rank a whole one; take the file "
                    "that was saved with these weights"
                )


def _of_one_adapter(tensors: Mapping[str, Tensor], directory: Path) -> dict[str, Tensor]:
    """Remove the name of the adapter from the names of its weights, which state_dict() has and PEFT's save_pretrained
    has not. Raises ModelError if there are weights of several adapters."""
    named = {name: match for name in tensors if (match := _NAME.search(name))}
    adapters = {match[1] or match[2] for match in named.values()}
    if len(adapters) > 1 or 0 < len(named) < sum(".lora_" in name for name in tensors):
        raise ModelError(
            f"{directory} has weights of several adapters: {named_few(adapters)}; save the one that you want with "
            "PEFT's save_pretrained(FOLDER, selected_adapters=[NAME])"
        )
    return {_NAME.sub("", name): each for name, each in tensors.items()}


def _require_saved_whole(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Raise ModelError for weights without numbers, and for matrices that are all 0: neither side could ever learn."""
    if empty := sorted(name for name, each in tensors.items() if not each.numel()):
        raise ModelError(
            f"{directory / WEIGHTS}: {named_few(empty)} have no numbers, as when DeepSpeed's ZeRO-3 saves an adapter "
            "whose parts it has not gathered; save it again with stage3_gather_16bit_weights_on_model_save: true"
        )
    matrices = [each for name, each in tensors.items() if ".lora_" in name]
    if matrices and not any(bool(each.any()) for each in matrices):
        raise ModelError(
            f"{directory / WEIGHTS}: all its matrices are 0, so it changes nothing and could not learn; it was saved "
            "wrongly, or already merged into its model"
        )


def has_no_effect(directory: Path) -> bool:
    """Return whether every B matrix of an adapter is 0, as before its first update."""
    second = [each for name, each in read_tensors(directory / WEIGHTS).items() if ".lora_B" in name]
    return bool(second) and not any(bool(each.any()) for each in second)


def _require_adapter_alone(tensors: Iterable[str], directory: Path) -> None:
    """Raise ModelError if weights of the model itself come with the adapter. PEFT saves embeddings that were resized
    and would copy them into the model, whose adapter could then be neither disabled nor saved as it was trained."""
    found = {name.removeprefix(PREFIX) for name in tensors if ".lora_" not in name}
    found = found or {file.name for pattern in WHOLE_OF_OTHERS for file in directory.glob(pattern)}
    if found:
        raise ModelError(
            f"{directory} has weights of the model itself beside its adapter: {named_few(found)}. If they were "
            "trained, merge both into the model in the framework that trained them, and set model.path to that model; "
            "if not, remove them"
        )


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _made(values: Mapping[str, Any], directory: Path) -> LoraConfig:
    try:
        return LoraConfig(**values)
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise ModelError(f"{directory / CONFIG}: the adapter cannot be read: {error}") from error


class _Names:
    """A translation between the names of a model's modules and those in published checkpoints. Before transformers 4.52
    the latter were the modules' own names, so adapters from that time use them."""

    def __init__(self, model: HuggingFaceModel):
        changes = get_model_conversion_mapping(model, add_legacy=False)
        self._to_model = [each for each in changes if isinstance(each, WeightRenaming)]
        self._to_published = [each.reverse_transform() for each in reversed(self._to_model)]
        self._modules = tuple(model.named_modules())

    def in_model(self, name: str) -> str:
        """Return the model's name for an adapter's weight."""
        if not name.startswith(PREFIX):
            return name
        return PREFIX + _renamed(name.removeprefix(PREFIX), self._to_model)

    def rename(self, config: LoraConfig) -> LoraConfig:
        """Convert a config with published names to one with the model's names, in which each layer is listed by
        name."""
        if config.target_modules == "all-linear":
            return config
        chosen = {}
        for name, module in self._modules:
            published = _renamed(name, self._to_published)
            if isinstance(module, nn.Linear) and check_target_module_exists(config, published):
                chosen[name] = published
        if not chosen:  # neither kind of names; loading the weights will report it
            return config
        patterns = {
            key: {
                name: value
                for pattern, value in reversed(getattr(config, key).items())  # the first that matches counts
                for name, published in chosen.items()
                if re.fullmatch(rf"(.*\.)?({pattern})", published)
            }
            for key in ("rank_pattern", "alpha_pattern")
        }
        renamed = dataclasses.replace(
            config, target_modules=sorted(chosen), exclude_modules=None, layers_to_transform=None, layers_pattern=None
        )
        renamed.rank_pattern, renamed.alpha_pattern = patterns["rank_pattern"], patterns["alpha_pattern"]
        return renamed


def _renamed(name: str, changes: Iterable[WeightTransform]) -> str:
    for change in changes:
        name, _ = change.rename_source_key(name)
    return name


def _with_layers(model: HuggingFaceModel, config: LoraConfig, directory: Path) -> PeftModel:
    """Add PEFT's layers, whose weights are loaded later. Raises ModelError if one of them is read without going through
    PEFT: its adapter would be saved and merged, but would neither learn nor have an effect."""
    adaptable = adaptable_names(model)
    try:
        peft = get_peft_model(model, config)
    except (ValueError, TypeError, LookupError, AttributeError, NotImplementedError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"{directory}: the adapter does not fit the model: {error}") from error
    if odd := adapted_names(model) - adaptable:
        raise ModelError(
            f"{directory} adapts {named_few(odd)}, which cannot be adapted here; train an adapter without it, or "
            "merge it into its model with PEFT's merge_and_unload, and set model.path to that model"
        )
    return peft


def _fill(peft: PeftModel, tensors: Mapping[str, Tensor], written: Mapping[str, str], directory: Path) -> None:
    """Copy the weights into PEFT's layers. `written` are their names in the file. Raises ModelError unless every weight
    on each side has its counterpart."""
    try:
        found: Any = set_peft_model_state_dict(peft, dict(tensors), adapter_name="default")
    except (RuntimeError, ValueError, LookupError) as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[2].strip() or str(error)
        raise ModelError(f"{directory}: the adapter does not fit the model: {reason}") from error
    missing = _plain(name for name in found.missing_keys if ".lora_" in name and ".default" in name)
    left = _plain(written.get(name := _without_adapter(each), name) for each in found.unexpected_keys)
    if missing or left:
        raise ModelError(
            f"{directory}: the adapter's weights do not fit the model. Missing in the file: "
            f"{named_few(missing) or 'none'}. Unknown to the model: {named_few(left) or 'none'}. It was made for "
            "another model, or the file is incomplete; use an adapter that was trained on this model.path"
        )


def _plain(names: Iterable[str]) -> set[str]:
    return {_without_adapter(name).removeprefix(PREFIX) for name in names}


def _without_adapter(name: str) -> str:
    return name.replace(".default", "")


MORE_RANKS, ITERATIONS = 16, 4  # for the randomised decomposition


@torch.no_grad()
def start_at_rounding(family: Family, model: HuggingFaceModel, dtype: torch.dtype) -> None:
    """Initialise the new adapter of a quantised model from its rounding errors. The checkpoint's weights are read to
    the CPU once more, in `dtype`."""
    exact = load_weights(family, dtype, torch.device("cpu"))
    if is_quantized(exact):
        raise ModelError(
            "lora.start: loftq needs the checkpoint in full precision, but this one is quantised; remove it"
        )
    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer) or not hasattr(layer.get_base_layer(), "compute_dtype"):
            continue  # a layer that is not quantised starts at zero
        quantized = dequantize_module_weight(layer.get_base_layer()).float()
        off = exact.get_parameter(f"{name}.weight").to(quantized) - quantized
        rank = layer.r["default"]
        left, values, right = torch.svd_lowrank(off, rank + MORE_RANKS, niter=ITERATIONS)
        roots = values[:rank].sqrt()
        first, second = (matrices["default"].get_parameter("weight") for matrices in (layer.lora_A, layer.lora_B))
        first.copy_(roots[:, None] * right.T[:rank])
        second.copy_(left[:, :rank] * roots / layer.scaling["default"])
