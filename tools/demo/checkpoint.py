"""A Qwen2.5-VL with 0.8 or 1.5 million random weights, saved in the form of a real checkpoint."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from examples.scenes import DIGIT_NAMES
from tiercel.demo.sheets import INKS

WORDS = (
    *("system", "user", "assistant", "Where", " is", " the", "?"),
    *(f" {name}" for name in DIGIT_NAMES),
    *(str(number) for number in range(113)),
    "[1, 2]",
    "<answer></answer>",
)
SHEET_WORDS = (
    *("system", "user", "assistant", "a", "What", " is", "Where", " the", "How", " many", "s", " sum", " of"),
    *(" ones", "Which", " digit", " left", "?", "; ", "[1, 2]", ":", " no", " here"),
    *(f" {ink}" for ink in INKS),
    *(str(number) for number in range(113)),
)
THOUGHT = ("<think>", "</think>")
ZOOM_WORDS = (
    *("system", "user", "assistant", "Tools", "zoom", "box", " label", " image", "label", "image"),
    *("Which", "Where", " digit", " is", " in", " the", " ring", "?"),
    *("tool", "call", "response", "name", "arguments", ", "),
    *(str(number) for number in range(113)),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """The sizes of a checkpoint. `hidden` is its width, a multiple of 32, and `layers` counts the language model's
    layers. `spread` is the standard deviation of the weights. `window` is the vision tower's window in pixels, and
    `whole_layers` are those of its two layers that see beyond it. Pictures below `least_pixels` are enlarged."""

    hidden: int = 128
    layers: int = 3
    spread: float = 0.02
    window: int = 112
    whole_layers: tuple[int, ...] = (1,)
    least_pixels: int = 56 * 56


def save_random_checkpoint(directory: Path, tokenizer: PreTrainedTokenizerFast, form: Form, *, seed: int) -> None:
    """Write the config, weights, tokenizer and image processor."""

    def special(token: str) -> int:
        return tokenizer.vocab[token]

    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": form.hidden,
            "intermediate_size": 3 * form.hidden,
            "num_hidden_layers": form.layers,
            "num_attention_heads": form.hidden // 32,
            "num_key_value_heads": form.hidden // 32,
            "max_position_embeddings": 1024,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
            "bos_token_id": None,
            "eos_token_id": special("<|im_end|>"),
            "pad_token_id": special("<|endoftext|>"),
            "tie_word_embeddings": True,
            "initializer_range": form.spread,
        },
        vision_config={
            "depth": 2,
            "hidden_size": form.hidden,
            "intermediate_size": 3 * form.hidden,
            "num_heads": form.hidden // 32,
            "out_hidden_size": form.hidden,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": form.window,
            "fullatt_block_indexes": list(form.whole_layers),
            "initializer_range": form.spread,
        },
        tie_word_embeddings=True,
        vision_start_token_id=special("<|vision_start|>"),
        vision_end_token_id=special("<|vision_end|>"),
        image_token_id=special("<|image_pad|>"),
        video_token_id=special("<|video_pad|>"),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config).float()
    model.generation_config.eos_token_id = [special("<|im_end|>")]
    model.generation_config.pad_token_id = special("<|endoftext|>")
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    Qwen2VLImageProcessorPil(min_pixels=form.least_pixels, max_pixels=28 * 28 * 1280).save_pretrained(directory)
