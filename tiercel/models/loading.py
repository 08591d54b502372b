"""Load checkpoints from a local directory or a hub: config and tokenizer first, weights separately. No code of a
checkpoint is run."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from packaging.version import InvalidVersion, Version
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, __version__
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tiercel.config.schema import Model, Quantization
from tiercel.errors import ModelError, TiercelError
from tiercel.models.attention import route_attention
from tiercel.models.experts import IMPLEMENTATION, mixtures
from tiercel.models.family import Checkpoint, Family, HuggingFaceModel
from tiercel.models.gemma3 import Gemma3
from tiercel.models.gemma4 import Gemma4
from tiercel.models.generic import AnyImageText
from tiercel.models.hub import resolve
from tiercel.models.internvl import InternVL
from tiercel.models.llava_onevision import LlavaOnevision
from tiercel.models.memory_errors import is_out_of_memory, memory_to_load
from tiercel.models.ovis2 import Ovis2
from tiercel.models.quantized import is_quantized, loading_options, settle, stored_quantization
from tiercel.models.qwen3_5 import Qwen35, Qwen35Moe
from tiercel.models.qwen3_vl import Qwen3VL, Qwen3VLMoe
from tiercel.models.qwen_vl import Qwen2VL, Qwen25VL
from tiercel.models.text_only import TextOnly
from tiercel.models.tower_attention import route_tower
from tiercel.types import CoordinateSpace

FAMILIES: dict[str, type[Family]] = {
    family.name: family
    for family in (
        Qwen2VL,
        Qwen25VL,
        Qwen3VL,
        Qwen3VLMoe,
        Qwen35,
        Qwen35Moe,
        Ovis2,
        InternVL,
        LlavaOnevision,
        Gemma3,
        Gemma4,
    )
}
PROVED: tuple[type[Family], ...] = (AnyImageText, TextOnly)  # for architectures without a family of their own
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHOWN_NAMES = 3
SMALLER = (
    "write a narrower model.dtype, take a smaller checkpoint or a machine with more memory, or share the model over "
    "several GPUs by train.strategy: fsdp2 (`tiercel plan` says what fits)"
)
INDEX = "model.safetensors.index.json"  # lists the files where weights are in several


def family_class(path: Path) -> type[Family]:
    """Find the family that config.json names. Raises ModelError for remote code and for unknown architectures."""
    config = read_config(path)
    model_type = config.get("model_type")
    if model_type == "ovis":
        raise ModelError(
            f"{path} is Ovis2 in its authors' own form, which needs remote code. Use the converted form, such as "
            "thisisiron/Ovis2-2B-hf, or convert it with transformers' "
            "src/transformers/models/ovis2/convert_ovis2_weights_to_hf.py"
        )
    require_no_code(path, config)
    stored_quantization(config, str(path))  # refuses others than those of model.quantize
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    if model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return AnyImageText
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return TextOnly
    raise ModelError(
        f"{path}: architecture {model_type!r} is no language model of transformers, of which {__version__} is installed"
        + _newer_needed(config)
    )


def _newer_needed(config: dict[str, Any]) -> str:
    """Say which transformers a config needs that is newer than the installed one; an empty text where it is not."""
    written_by = config.get("transformers_version")
    try:
        is_newer = Version(str(written_by)) > Version(__version__)
    except InvalidVersion:
        return ""
    return f"; config.json was written by {written_by}: install that or a newer one" if is_newer else ""


def load_family(model: Model, template: str | None = None, coordinates: CoordinateSpace | None = None) -> Family:
    """Load config, tokenizer and image processor; no weights. `template`: a file with a chat template; `coordinates`:
    the space of boxes, for a family that documents none. Raises ModelError where one of them cannot be read, and where
    a family that needs a proof does not pass its first part."""
    path = resolve(model)
    chosen = family_class(path)
    if not chosen.has_pixel_limits and (model.min_pixels or model.max_pixels):
        key = "min_pixels" if model.max_pixels is None else "max_pixels"
        raise ModelError(f"model.{key}: {chosen.name} {chosen.sizes} and has no such limit; remove it")
    try:
        # Without trust_remote_code=False, transformers would ask at the terminal whether to run a tokenizer's code.
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        image_processor = chosen.read_image_processor(path)
    except TiercelError:
        raise
    except Exception as error:  # tokenizers raises Exception itself for broken files
        raise ModelError(
            f"{path}: config, tokenizer or image processor cannot be read: {type(error).__name__}: {error}"
        ) from error
    checkpoint = Checkpoint(
        path=str(path),
        config=config,
        tokenizer=tokenizer,
        image_processor=image_processor,
        chat_template=_chat_template(path, tokenizer, template),
        end_token_ids=_end_token_ids(path, tokenizer),
    )
    family = chosen(checkpoint, model.min_pixels, model.max_pixels)
    family.take_coordinates(coordinates)
    family.prove_encoding()
    return family


def load_weights(
    family: Family,
    dtype: torch.dtype,
    device: torch.device,
    path: Path | None = None,
    quantize: Quantization | None = None,
) -> HuggingFaceModel:
    """Load the Hugging Face model in evaluation mode, with no parameter trainable. `path`: a directory with other
    weights than the checkpoint's. `quantize`: as model.quantize; a checkpoint that is quantised stays so. Raises
    ModelError where the weights are not safetensors files that can be read, are incomplete, or do not fit into
    memory."""
    directory = path or Path(family.checkpoint.path)
    require_safetensors(directory)
    stored = stored_quantization(read_config(directory), str(directory))
    if stored and quantize and stored != quantize:
        raise ModelError(f"model.quantize: {quantize} given, but {directory} is quantised already, as {stored}")
    options = loading_options(family, quantize, dtype, device, is_stored=stored is not None)
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
            output_loading_info=True,
            **options,
        )
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        if "scaled_dot_product_attention" in str(error):
            raise ModelError(
                f"{directory}: transformers computes {family.checkpoint.config.model_type} without "
                "scaled_dot_product_attention, whose place the forms of attention here take; take another model"
            ) from error
        raise ModelError(f"{directory}: its weights cannot be read: {error}") from error
    model: HuggingFaceModel
    model, found = loaded
    if missing := found["missing_keys"]:
        raise ModelError(
            f"{directory} has no weights for {named_few(missing)}, and transformers would make random ones; the "
            "files are incomplete, or config.json is that of another model"
        )
    model.requires_grad_(False)
    # It is not used here, and transformers refuses to save some of the published ones.
    model.generation_config = GenerationConfig()
    route_attention(family.language_model(model))
    if any(mixture.uses_kernels for mixture in mixtures(model)):
        model.set_experts_implementation(IMPLEMENTATION)
    if tower := family.tower_of_spans(model):
        route_tower(tower)
    if is_quantized(model):
        settle(model, dtype)
        return model.eval()
    return model.to(device).eval()


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file to the CPU. Raises ModelError where it cannot be read or does not fit
    into memory."""
    with memory_to_load(file, "free some memory, or put the right file there"):
        return _tensors(file)


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"{file} cannot be read as a safetensors file: {error}") from error


def named_few(names: Collection[str]) -> str:
    """List the first few names in order, and say how many more there are."""
    shown = sorted(names)[:SHOWN_NAMES]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def read_config(path: Path) -> dict[str, Any]:
    """Read config.json. Raises ModelError where there is none or it cannot be read."""
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"model.path: {path} has no config.json")
    return read_json(file)


def require_no_code(path: Path, config: dict[str, Any]) -> None:
    """Raise ModelError where a config.json asks to run code of the checkpoint."""
    if "auto_map" in config:
        raise ModelError(
            f"{path}: config.json asks to run code of the checkpoint (auto_map), and tiercel never runs such code; use "
            "a checkpoint in transformers' own format"
        )


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file of the checkpoint. Raises ModelError where the file has none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} is JSON, but not a JSON object")
    return content


def require_safetensors(directory: Path) -> None:
    """Raise ModelError where an index names files of another kind or in another directory."""
    if not (directory / INDEX).is_file():
        return
    files = read_json(directory / INDEX).get("weight_map")
    for file in files.values() if isinstance(files, dict) else [files]:
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(
                f"{directory / INDEX} names {file!r}; weights are read only from .safetensors files in the same "
                "directory"
            )


def _chat_template(path: Path, tokenizer, template: str | None) -> str:
    if template is not None:
        try:
            return Path(template).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ModelError(f"data.template: {template} cannot be read: {error}") from error
    if tokenizer.chat_template:
        return tokenizer.chat_template
    legacy = path / "chat_template.json"
    if legacy.is_file() and isinstance(found := read_json(legacy).get("chat_template"), str):
        return found
    raise ModelError(f"{path} has no chat template; set data.template to a file that has one")


def _end_token_ids(path: Path, tokenizer) -> tuple[int, ...]:
    """Return the tokenizer's end token, then the others of generation_config.json."""
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    file = path / "generation_config.json"
    if file.is_file():
        more = read_json(file).get("eos_token_id") or []
        ids += more if isinstance(more, list) else [more]
    if not ids:
        raise ModelError(f"{path} names no end token (eos_token) in its tokenizer or generation_config.json")
    return tuple(dict.fromkeys(ids))
