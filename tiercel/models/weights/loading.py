"""Loading of checkpoints from a local directory or a hub: config and tokenizer first, weights separately. Code of a
checkpoint is never run."""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from packaging.version import InvalidVersion, Version
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, __version__
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tiercel.config.schema import BaseRecipe, Model, Quantization
from tiercel.errors import ModelError, TiercelError
from tiercel.models.chat import take_turn_end
from tiercel.models.families.base import Checkpoint, Family, HuggingFaceModel
from tiercel.models.families.gemma3 import Gemma3
from tiercel.models.families.gemma4 import Gemma4
from tiercel.models.families.generic import AnyImageText
from tiercel.models.families.internvl import InternVL
from tiercel.models.families.llava_onevision import LlavaOnevision
from tiercel.models.families.ovis2 import Ovis2
from tiercel.models.families.qwen2_vl import Qwen2VL, Qwen25VL
from tiercel.models.families.qwen3_vl import Qwen3VL, Qwen3VLMoe, Qwen35, Qwen35Moe
from tiercel.models.families.text_only import TextOnly
from tiercel.models.layers.attention import route_attention
from tiercel.models.layers.dropout import switch_off_dropout
from tiercel.models.layers.experts import IMPLEMENTATION, mixtures
from tiercel.models.layers.quantized import is_quantized, loading_options, settle, stored_quantization
from tiercel.models.layers.rotary import keep_frequencies, require_steady_positions
from tiercel.models.layers.tower_attention import route_tower
from tiercel.models.template_arguments import with_arguments
from tiercel.models.weights.hub import resolve
from tiercel.models.weights.memory_errors import is_out_of_memory, memory_to_load
from tiercel.models.weights.unsupported_checkpoints import require_transformers_form
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
    "use a narrower model.dtype, a smaller checkpoint or a machine with more memory, or share the model over several "
    "GPUs with train.strategy: fsdp2 (`tiercel plan` says what fits)"
)
ADAPTER_CONFIG = "adapter_config.json"
BUFFERS = ("inv_freq", "position_ids")  # saved by older versions of transformers, although they are computed
USUAL_SIZE = (640, 480)  # (width, height) of a picture that every image processor takes
SCALED = ("I8", "U8", "F8", "F4", "F6")  # prefixes of a header's dtypes that need a scale
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"  # lists the files if the weights are in several


def family_class(path: Path) -> type[Family]:
    """Return the class of the family that config.json names. Raises ModelError for remote code and for unknown
    architectures."""
    config = read_config(path)
    model_type = config.get("model_type")
    require_transformers_form(path, config)
    require_no_code(path, config)
    require_no_adapter(path)
    stored_quantization(config, str(path))  # refuses kinds that model.quantize does not have
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    if model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return AnyImageText
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return TextOnly
    raise ModelError(
        f"{path}: architecture {model_type!r} is not a language model of the installed transformers {__version__}"
        + _newer_needed(config)
    )


def _newer_needed(config: dict[str, Any]) -> str:
    """Return a hint about the newer transformers that a config needs, or an empty text if the installed one is new
    enough."""
    written_by = config.get("transformers_version")
    try:
        is_newer = Version(str(written_by)) > Version(__version__)
    except InvalidVersion:
        return ""
    return (
        (f"; config.json was written by transformers {written_by}: install that version or a newer one")
        if is_newer
        else ""
    )


def family_of(recipe: BaseRecipe) -> Family:
    """Load the family of a recipe's model, with its chat template; no weights. Raises ModelError as `load_family`, and
    if the recipe allows rows that are too long for the model's positions."""
    data = recipe.data
    family = load_family(recipe.model, data.template, data.coordinates, data.template_arguments)
    config = family.checkpoint.config.get_text_config()
    require_steady_positions(config, family.checkpoint.path, recipe.longest_row, recipe.longest_row_keys)
    return family


def load_family(
    model: Model,
    template: str | None = None,
    coordinates: CoordinateSpace | None = None,
    template_arguments: Mapping[str, Any] = MappingProxyType({}),
) -> Family:
    """Load config, tokenizer and image processor, but no weights. `template` is a file with a chat template, whose
    variables `template_arguments` sets; `coordinates` is the space of boxes, for a family that documents none. Raises
    ModelError if one of them cannot be read, or if a family that needs a proof does not pass its first part."""
    path = resolve(model)
    chosen = family_class(path)
    if not chosen.has_pixel_limits and (model.min_pixels or model.max_pixels):
        key = "min_pixels" if model.max_pixels is None else "max_pixels"
        raise ModelError(
            f"model.{key}: is set, but {chosen.name} {chosen.sizes} and has no such limit; remove this key"
        )
    try:
        # Without trust_remote_code=False, transformers would ask at the terminal whether to run a tokenizer's code.
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        image_processor = chosen.read_image_processor(path)
    except TiercelError:
        raise
    except Exception as error:  # tokenizers raises plain Exception for broken files
        raise ModelError(
            f"{path}: config, tokenizer or image processor cannot be read: {type(error).__name__}: {error}"
        ) from error
    checkpoint = Checkpoint(
        path=str(path),
        config=config,
        tokenizer=tokenizer,
        image_processor=image_processor,
        chat_template=with_arguments(_chat_template(path, tokenizer, template), template_arguments),
        end_token_ids=_end_token_ids(path, tokenizer),
    )
    try:
        family = chosen(checkpoint, model.min_pixels, model.max_pixels)
        vocabulary_size, placeholder_ids = family.vocabulary_size, family.placeholder_ids
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"{path}: config.json does not describe a model of {chosen.name}: {type(error).__name__}: {error}"
        ) from error
    require_embeddings(path, tokenizer, vocabulary_size, placeholder_ids)
    require_placeholder(family)
    require_processor(family)
    family.take_coordinates(coordinates)
    family.prove_encoding()
    take_turn_end(family)
    require_end_tokens(family)
    return family


def require_end_tokens(family: Family) -> None:
    """Raise ModelError if a token that ends a completion has no embedding, because it could never be sampled."""
    if odd := [token for token in family.checkpoint.end_token_ids if token >= family.vocabulary_size]:
        raise ModelError(
            f"{family.checkpoint.path}: {family.tokenizer.convert_ids_to_tokens(odd[0])!r} ends a turn in its "
            f"tokenizer, as token {odd[0]}, but its model has only {family.vocabulary_size} embeddings; correct "
            "eos_token in tokenizer_config.json"
        )


def require_embeddings(path: Path, tokenizer: Any, count: int, placeholder_ids: Collection[int] = ()) -> None:
    """Raise ModelError if a tokenizer has more tokens than the model has embeddings. Special tokens may lie beyond, as
    in text-only Gemma 3; a row that contains one is refused when it is encoded."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    beyond = {number: token for token, number in tokenizer.get_vocab().items() if number >= count}
    if odd := sorted(beyond.keys() - special - set(placeholder_ids)):
        raise ModelError(
            f"{path}: its tokenizer has {odd[-1] + 1} tokens, but its model only {count} embeddings, and none for "
            f"{named_few([beyond[number] for number in odd])}; add them with transformers' "
            f"resize_token_embeddings({odd[-1] + 1}) and save_pretrained, or use the tokenizer that belongs to the "
            "model"
        )


def require_placeholder(family: Family) -> None:
    """Raise ModelError if the token that config.json names for pictures is an ordinary word, or does not exist."""
    if family.needs_proof or family.image_marker is None:
        return
    token, path = family.placeholder_ids[0], family.checkpoint.path
    if family.marker_is_placeholder and token != (own := family.tokenizer.convert_tokens_to_ids(family.image_marker)):
        raise ModelError(
            f"{path}: config.json names token {token} for pictures, but {family.image_marker} is {own} in its "
            "tokenizer; config.json and tokenizer belong to different models"
        )
    if token not in family.tokenizer.added_tokens_decoder:
        word = family.tokenizer.convert_ids_to_tokens(token) if 0 <= token < len(family.tokenizer) else None
        raise ModelError(
            f"{path}: config.json names token {token} for pictures, which in its tokenizer is "
            + (f"the ordinary {word!r}" if word else "none")
            + "; config.json and tokenizer belong to different models"
        )


def require_processor(family: Family) -> None:
    """Raise ModelError if the image processor cuts pictures into other patches than the model expects, or cannot
    process a picture at all."""
    processor, vision = family.checkpoint.image_processor, getattr(family.checkpoint.config, "vision_config", None)
    if processor is None or family.needs_proof:
        return
    place = f"{family.checkpoint.path}: preprocessor_config.json does not belong to this model: "
    for name, key in (("patch_size", "patch_size"), ("merge_size", "spatial_merge_size")):
        there, here = getattr(processor, name, None), getattr(vision, key, None)
        if isinstance(there, int) and isinstance(here, int) and there != here:
            raise ModelError(place + f"{name} is {there}, but in config.json {key} is {here}")
    for name in ("image_mean", "image_std"):
        if len(values := getattr(processor, name, None) or (0, 0, 0)) != 3:
            raise ModelError(place + f"{name} has {len(values)} numbers, but a pixel has 3 colours")
    try:
        family.image_token_ids(family.plan_image(USUAL_SIZE))
    except ModelError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelError(place + f"{type(error).__name__}: {error}") from error


def require_no_adapter(path: Path) -> None:
    """Raise ModelError if a model's directory also has an adapter, which transformers would add to the model
    unasked."""
    if (path / ADAPTER_CONFIG).is_file():
        raise ModelError(
            f"{path} has {ADAPTER_CONFIG} beside its config.json, and transformers would add that adapter to the "
            "model; move the adapter's files into a directory of their own and name it where you need it (lora.init, "
            "--adapter, the adapter of a teacher or a reward model)"
        )


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


def _chat_template(path: Path, tokenizer, template: str | None) -> str:
    """Return the recipe's template, or that of the checkpoint's processor, as transformers and vLLM use it, or that of
    its tokenizer, which may be of the language model that it began as. A byte order mark is not part of it."""
    if template is not None:
        try:
            return Path(template).read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise ModelError(f"data.template: {template} cannot be read: {error}") from error
    written, legacy = tokenizer.chat_template, path / "chat_template.json"
    if legacy.is_file() and not (path / "chat_template.jinja").is_file():  # the tokenizer reads the latter too
        written = read_json(legacy).get("chat_template") or written
    if isinstance(written, dict):  # several by name
        written = written.get("default")
    if isinstance(written, str) and written:
        return written.removeprefix("\ufeff")
    raise ModelError(f"{path} has no chat template; set data.template to a file that has one")


def _end_token_ids(path: Path, tokenizer) -> tuple[int, ...]:
    """Return the tokenizer's end token, then the others of generation_config.json."""
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    file = path / "generation_config.json"
    if file.is_file():
        more = read_json(file).get("eos_token_id") or []
        more = more if isinstance(more, list) else [more]
        if odd := [each for each in more if type(each) is not int or not 0 <= each < len(tokenizer)]:
            raise ModelError(
                f"{file}: eos_token_id {odd[0]!r} is not a token of its tokenizer, which has {len(tokenizer)}; "
                "correct it, or remove the file"
            )
        ids += more
    if not ids:
        raise ModelError(f"{path} does not name an end token (eos_token) in its tokenizer or generation_config.json")
    return tuple(dict.fromkeys(ids))
