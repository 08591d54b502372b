"""Checkpoints of published sizes without weights, with tiny tokenizers; their weights are made on the card where a run
loads them. Rows whose prompts all have the same length, with a picture."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.quantizers import AutoHfQuantizer

from benchmarks.published import save_config
from tests.tiny_models import make_row, noise_image, save_tiny_checkpoint
from tiercel.config.schema import Model
from tiercel.models.families.base import Family
from tiercel.models.families.loading import family_class, load_family
from tiercel.models.prompts import encode_prompt
from tiercel.models.weights import loading
from tiercel.types import EncodedImage

CONFIGS = Path(__file__).parents[1] / "planning" / "configs"
WORDS = (" seven", "a")  # each is one token of some of the tiny tokenizers
Pairs = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class FullSize:
    """A published model."""

    family: str
    size: str = ""  # of benchmarks.published; empty: it is a folder of CONFIGS

    def config(self, name: str, directory: Path) -> Pairs:
        """Return the published config.json."""
        made = CONFIGS / name if not self.size else save_config(self.family, self.size, directory)
        return json.loads((made / "config.json").read_text(encoding="utf-8"))


MODELS = {
    "qwen2_5_vl_3b": FullSize(family="qwen2_5_vl", size="3b"),
    "qwen2_5_vl_7b": FullSize(family="qwen2_5_vl", size="7b"),
    "qwen2_5_vl_72b": FullSize(family="qwen2_5_vl", size="72b"),
    "gemma3_12b": FullSize(family="gemma3"),
    "qwen3_vl_30b_a3b": FullSize(family="qwen3_vl_moe"),
    "qwen3_5_27b": FullSize(family="qwen3_5"),
    "qwen3_5_35b_a3b": FullSize(family="qwen3_5_moe"),
}


def save_checkpoint(name: str, directory: Path) -> Path:
    """Write everything of a checkpoint but its weights, with the ids of the tiny tokenizer's tokens."""
    model = MODELS[name]
    published = model.config(name, directory / "published")
    save_tiny_checkpoint(model.family, directory)
    (directory / "model.safetensors").unlink()
    file = directory / "config.json"
    tiny = json.loads(file.read_text(encoding="utf-8"))
    config = published | _token_ids(tiny) | {"text_config": published["text_config"] | _token_ids(tiny["text_config"])}
    file.write_text(json.dumps(config), encoding="utf-8")
    _save_image_processor(directory)
    return directory


def _token_ids(config: Pairs) -> Pairs:
    return {key: value for key, value in config.items() if key.endswith(("_token_id", "_token_index"))}


def _save_image_processor(directory: Path) -> None:
    """Write a processor for pictures of the config's size."""
    processor = family_class(directory).image_processor_class
    vision = AutoConfig.from_pretrained(directory).vision_config
    if size := getattr(vision, "image_size", None):
        options: Pairs = {"size": {"height": size, "width": size}}
    else:
        options = {name: getattr(vision, name) for name in ("patch_size", "temporal_patch_size")}
        options |= {"merge_size": vision.spatial_merge_size, "max_pixels": 2**21}
    processor(**options).save_pretrained(directory)


def write_rows(checkpoint: Path, directory: Path, prompt_tokens: int, count: int) -> Path:
    """Write rows with a large picture of their own and enough words."""
    family = load_family(Model(path=str(checkpoint)))
    side, text = _largest_picture(family, prompt_tokens)
    lines = []
    for number in range(count):
        noise_image(side, side, number).save(directory / f"{number}.png")
        messages = [{"role": "user", "content": "<image>" + text}]
        lines.append(json.dumps({"id": str(number), "images": [f"{number}.png"], "messages": messages, "answer": "1"}))
    file = directory / "rows.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def _largest_picture(family: Family, prompt_tokens: int) -> tuple[int, str]:
    """Return the side of a square picture and the text that makes a prompt of that length with it. The picture is the
    only one that the processor makes, or the largest of at most 34 x 34 tokens that leaves room for a text."""
    processor: Any = family.checkpoint.image_processor
    merge = getattr(processor, "merge_size", None)
    sides = [tokens * processor.patch_size * merge for tokens in (34, 33)] if merge else [processor.size["height"]]
    for side in sides:
        picture = family.encode_image(noise_image(side, side, 0))

        def length(text: str, picture: EncodedImage = picture) -> int:
            row = make_row("row", f"<image>{text}", 1, None)
            return len(encode_prompt(family, row, 0, [picture], system=None, max_prompt_tokens=2**20).token_ids_P)

        for word in WORDS:
            room = prompt_tokens - length(word)
            if room >= 0 and length(text := word * (room + 1)) == prompt_tokens:
                return side, text
    raise AssertionError(f"no prompt of {family.name} has {prompt_tokens} tokens")


@contextmanager
def weights_made_on(device: torch.device, *, sharded: bool = False) -> Iterator[None]:
    """Make transformers read weights of any checkpoint from nowhere: they get memory on the device, and no values. If
    they are sharded, they get it when the shares are moved to the device."""

    def from_nowhere(directory: Path, *, dtype: torch.dtype, quantization_config: Any = None, **options: Any) -> Any:
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(
                AutoConfig.from_pretrained(directory), dtype=dtype, attn_implementation="sdpa"
            )
        found: Pairs = {"missing_keys": [], "mismatched_keys": [], "unexpected_keys": []}
        if options.get("device_map") == "meta":
            return model, found
        if sharded:
            model.to = lambda place: model.to_empty(device=device) if torch.device(place) == device else model
            return model, found
        if quantization_config is not None:
            quantizer = AutoHfQuantizer.from_config(quantization_config, pre_quantized=False)
            quantizer.preprocess_model(model=model, dtype=dtype, device_map={"": device})
        _fill(model, dtype, device)
        if quantization_config is not None:
            quantizer.postprocess_model(model)
        return model, found

    with (
        mock.patch.object(AutoModelForImageTextToText, "from_pretrained", from_nowhere),
        mock.patch.object(loading, "require_finite", lambda *given: None),  # no sum is computed
    ):
        yield


def _fill(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give memory to the tensors of torch's meta device. A shared tensor stays shared."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    if id(tensor) not in made:
                        made[id(tensor)] = _filled(tensor, dtype, device)
                    held[name] = made[id(tensor)]


def _filled(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor on the device, quantised if this one is to be."""
    if not isinstance(tensor, nn.Parameter):
        return torch.empty_like(tensor, device=device)
    if type(tensor) is nn.Parameter:
        return nn.Parameter(torch.empty_like(tensor, device=device), requires_grad=False)
    kind: Any = type(tensor)  # of bitsandbytes
    return kind(torch.empty(tensor.shape, dtype=dtype, device=device), requires_grad=False, **vars(tensor)).to(device)
