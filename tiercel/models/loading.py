"""Checkpoints from a local directory or a hub: config and tokenizer first, weights apart. No code of theirs is run."""

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig

from tiercel.config.schema import Model
from tiercel.errors import EnvironmentProblem, ModelError
from tiercel.models.attention import route_attention
from tiercel.models.family import Checkpoint, Family, HuggingFaceModel
from tiercel.models.ovis2 import Ovis2
from tiercel.models.qwen_vl import Qwen2VL, Qwen25VL

FAMILIES: dict[str, type[Family]] = {family.name: family for family in (Qwen2VL, Qwen25VL, Ovis2)}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CHECKPOINT_FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")


def resolve(model: Model) -> Path:
    """The checkpoint's local directory, fetched from its hub where the path is a model id."""
    path = Path(model.path).expanduser()
    if path.is_dir():
        return path
    if model.hub == "modelscope":
        try:
            from modelscope import snapshot_download
        except ImportError as error:
            raise EnvironmentProblem("model.hub: modelscope needs its package: pip install modelscope") from error
        return Path(snapshot_download(model.path, revision=model.revision, allow_patterns=list(CHECKPOINT_FILES)))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(model.path, revision=model.revision, allow_patterns=list(CHECKPOINT_FILES)))
    except RepositoryNotFoundError as error:
        raise ModelError(f"model.path: {model.path} is neither a directory nor a model of the hub") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise EnvironmentProblem(f"model.path: {model.path} could not be fetched: {error}") from error


def family_class(path: Path) -> type[Family]:
    """The family that config.json names. Raises ModelError for remote code and for unknown architectures."""
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"model.path: {path} has no config.json") from error
    except json.JSONDecodeError as error:
        raise ModelError(f"{file} is not JSON: {error}") from error
    model_type = config.get("model_type")
    if model_type == "ovis":
        raise ModelError(
            f"{path} is Ovis2 in its authors' own form, which needs remote code. Use the converted form, such as "
            "thisisiron/Ovis2-2B-hf, or convert it with transformers' "
            "src/transformers/models/ovis2/convert_ovis2_weights_to_hf.py"
        )
    if "auto_map" in config:
        raise ModelError(
            f"{path}: config.json asks to run code of its own (auto_map), and tiercel runs none; use a checkpoint "
            "in transformers' own format"
        )
    if model_type not in FAMILIES:
        raise ModelError(f"{path}: unknown architecture {model_type!r}; known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]


def load_family(model: Model, template: str | None = None) -> Family:
    """Config, tokenizer and image processor; no weights. `template` is a file with a chat template."""
    path = resolve(model)
    chosen = family_class(path)
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    checkpoint = Checkpoint(
        path=str(path),
        config=AutoConfig.from_pretrained(path, local_files_only=True),
        tokenizer=tokenizer,
        image_processor=chosen.image_processor_class.from_pretrained(path, local_files_only=True),
        chat_template=_chat_template(path, tokenizer, template),
        end_token_ids=_end_token_ids(path, tokenizer),
    )
    return chosen(checkpoint, model.min_pixels, model.max_pixels)


def load_weights(
    family: Family, dtype: torch.dtype, device: torch.device, path: Path | None = None
) -> HuggingFaceModel:
    """The Hugging Face model in evaluation mode, nothing trainable; `path` in place of the checkpoint's own weights."""
    model: HuggingFaceModel = AutoModelForImageTextToText.from_pretrained(
        path or family.checkpoint.path,
        dtype=dtype,
        attn_implementation="sdpa",
        local_files_only=True,
        use_safetensors=True,
    )
    model.requires_grad_(False)
    # Nothing here generates by it, and some published ones are refused by transformers' own check when saved.
    model.generation_config = GenerationConfig()
    route_attention(family.language_model(model))
    return model.to(device).eval()


def _chat_template(path: Path, tokenizer, template: str | None) -> str:
    if template is not None:
        return Path(template).read_text(encoding="utf-8")
    if tokenizer.chat_template:
        return tokenizer.chat_template
    legacy = path / "chat_template.json"
    if legacy.is_file():
        return json.loads(legacy.read_text(encoding="utf-8"))["chat_template"]
    raise ModelError(f"{path} has no chat template; give data.template a file with one")


def _end_token_ids(path: Path, tokenizer) -> tuple[int, ...]:
    """The tokenizer's end token first, then the others of generation_config.json."""
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    file = path / "generation_config.json"
    if file.is_file():
        more = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") or []
        ids += more if isinstance(more, list) else [more]
    if not ids:
        raise ModelError(f"{path} names no end token (eos_token) in its tokenizer or generation_config.json")
    return tuple(dict.fromkeys(ids))
