"""Load the family of a checkpoint: config, tokenizer, image processor and chat template, but no weights."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from packaging.version import InvalidVersion, Version
from transformers import AutoConfig, AutoTokenizer, __version__
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tiercel.config.schema import BaseRecipe, Model
from tiercel.errors import ModelError, TiercelError
from tiercel.models.chat import take_turn_end
from tiercel.models.families.base import Checkpoint, Family
from tiercel.models.families.consistency import (
    require_embeddings,
    require_end_tokens,
    require_placeholder,
    require_processor,
)
from tiercel.models.families.gemma3 import Gemma3
from tiercel.models.families.gemma4 import Gemma4
from tiercel.models.families.generic import AnyImageText
from tiercel.models.families.internvl import InternVL
from tiercel.models.families.llava_onevision import LlavaOnevision
from tiercel.models.families.ovis2 import Ovis2
from tiercel.models.families.qwen2_vl import Qwen2VL, Qwen25VL
from tiercel.models.families.qwen3_vl import Qwen3VL, Qwen3VLMoe, Qwen35, Qwen35Moe
from tiercel.models.families.text_only import TextOnly
from tiercel.models.layers.quantized import stored_quantization
from tiercel.models.layers.rotary import require_steady_positions
from tiercel.models.template_arguments import with_arguments
from tiercel.models.weights.checkpoint_files import read_config, read_json, require_no_adapter, require_no_code
from tiercel.models.weights.hub import resolve
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
