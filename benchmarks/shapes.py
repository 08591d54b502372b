"""What every framework is given to train: checkpoints of published models' shapes with random weights, and images.

    python -m benchmarks.shapes DIRECTORY --vocabulary 152064 --layers 8
    python -m benchmarks.shapes DIRECTORY --side 448 --count 4

This runs in tiercel's own environment, without torchvision. The processor's files are those of a published checkpoint,
so that AutoProcessor can read them in the peers' environments. Weights, tokenizer and images depend only on the
arguments.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from benchmarks.drivers.measuring import QUESTION, SYSTEM

HIDDEN_SIZE = 512
SPECIAL_TOKENS = (  # in a published checkpoint, 151643 to 151656
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
ROWS_FROM_FIRST_SPECIAL_TOKEN = 152_064 - 151_643  # the same room at the end of any vocabulary
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA_NAMES = {  # names by which its processor asks the tokenizer for them; each replaces one of Qwen's
    "boi_token": ("<start_of_image>", "<|vision_start|>"),
    "eoi_token": ("<end_of_image>", "<|vision_end|>"),
    "image_token": ("<image_soft_token>", "<|image_pad|>"),
}
PATCHES = {
    "min_pixels": 56 * 56,
    "max_pixels": 28 * 28 * 1280,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "processor_class": "Qwen2_5_VLProcessor",
}


def make_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer that knows the prompt's words. Fillers take the ids up to the first special
    token."""
    return PreTrainedTokenizerFast(
        tokenizer_object=_bpe(vocabulary, SPECIAL_TOKENS),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def make_gemma_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return the same with Gemma's names for the tokens around a picture."""
    names = {old: new for new, old in GEMMA_NAMES.values()}
    template = CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<start_of_image>")
    return PreTrainedTokenizerFast(
        tokenizer_object=_bpe(vocabulary, [names.get(token, token) for token in SPECIAL_TOKENS]),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
        **{name: new for name, (new, _) in GEMMA_NAMES.items()},
    )


def _bpe(vocabulary: int, special_tokens: Sequence[str]) -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    words = f"system\n{SYSTEM} user\n{QUESTION} assistant\n"
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator([words] * 50, trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet))
    specification = json.loads(bpe.to_str())
    ids = specification["model"]["vocab"]
    first_special_token = vocabulary - ROWS_FROM_FIRST_SPECIAL_TOKEN
    ids.update({f"filler{number}": number for number in range(len(ids), first_special_token)})
    bpe = Tokenizer.from_str(json.dumps(specification))
    bpe.add_special_tokens([AddedToken(token, special=True) for token in special_tokens])
    return bpe


def text_config(vocabulary: int, layers: int, ids: dict[str, int]) -> dict[str, Any]:
    """Return a decoder 512 wide with 8 heads of 64 and a tied head. `ids` are those of the special tokens."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 1376,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "tie_word_embeddings": True,
    }


def qwen_ids(ids: dict[str, int]) -> dict[str, Any]:
    """Return what the configs of Qwen's models contain besides their parts."""
    return {
        "tie_word_embeddings": True,
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
    }


def make_config(vocabulary: int, layers: int, ids: dict[str, int]) -> Qwen2_5_VLConfig:
    """Return a small config of Qwen2.5-VL's architecture."""
    rope = {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e6}
    return Qwen2_5_VLConfig(
        text_config=text_config(vocabulary, layers, ids) | {"rope_parameters": rope},
        vision_config={
            "depth": 6,
            "hidden_size": 256,
            "intermediate_size": 688,
            "num_heads": 4,
            "out_hidden_size": HIDDEN_SIZE,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [2, 5],
        },
        **qwen_ids(ids),
    )


def make_qwen3_5_config(vocabulary: int, layers: int, ids: dict[str, int]) -> Qwen3_5Config:
    """Return a small config of Qwen3.5's architecture: three layers with a delta net, then one with attention."""
    rope = {"rope_type": "default", "mrope_section": [3, 3, 2], "rope_theta": 1e7}
    rope |= {"mrope_interleaved": True, "partial_rotary_factor": 0.25}
    delta = {"linear_conv_kernel_dim": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
    delta |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * layers
    text = {"head_dim": 64, "rope_parameters": rope, "layer_types": kinds[:layers]}
    return Qwen3_5Config(
        text_config=text_config(vocabulary, layers, ids) | text | delta,
        vision_config={
            "depth": 6,
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_heads": 4,
            "out_hidden_size": HIDDEN_SIZE,
            "num_position_embeddings": 48 * 48,
        },
        **qwen_ids(ids),
    )


def make_gemma3_config(vocabulary: int, layers: int, ids: dict[str, int]) -> Gemma3Config:
    """Return a small config of Gemma 3's architecture: five layers with a window of 1,024 tokens, then one without; a
    picture of 896 x 896 pixels becomes 256 tokens. As in Gemma 3 4B, its tower takes about half as many operations for
    a picture as all of 16 decoder layers for an update on 800 tokens (0.50; there 0.54)."""
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * layers
    text = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 1024, "layer_types": kinds[:layers]}
    return Gemma3Config(
        text_config=text_config(vocabulary, layers, ids) | text,
        vision_config={
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 896,
            "patch_size": 14,
            "vision_use_head": False,
        },
        mm_tokens_per_image=256,
        image_token_id=ids["<image_soft_token>"],
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
        tie_word_embeddings=True,
    )


def save_checkpoint(directory: Path, vocabulary: int, layers: int) -> None:
    """Write config, weights, tokenizer and processor files of Qwen2.5-VL's shape."""
    tokenizer, ids = _tokenizer_and_ids(vocabulary)
    model = Qwen2_5_VLForConditionalGeneration(make_config(vocabulary, layers, ids)).float()
    model.save_pretrained(directory)
    save_processor(directory, tokenizer)


def save_qwen3_5(directory: Path, vocabulary: int, layers: int) -> None:
    """Write the same for Qwen3.5's shape."""
    tokenizer, ids = _tokenizer_and_ids(vocabulary)
    model = Qwen3_5ForConditionalGeneration(make_qwen3_5_config(vocabulary, layers, ids)).float()
    model.save_pretrained(directory)
    patches = {"patch_size": 16, "max_pixels": 32 * 32 * 1280, "processor_class": "Qwen3VLProcessor"}
    save_processor(directory, tokenizer, PATCHES | patches)


def save_gemma3(directory: Path, vocabulary: int, layers: int) -> None:
    """Write the same for Gemma 3's shape, without the files of generation."""
    tokenizer = make_gemma_tokenizer(vocabulary)
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(make_gemma3_config(vocabulary, layers, tokenizer.vocab)).float()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    images = {"size": {"height": 896, "width": 896}, "image_seq_length": 256, "do_pan_and_scan": False}
    images |= {"image_processor_type": "Gemma3ImageProcessor", "processor_class": "Gemma3Processor"}
    _write(directory / "preprocessor_config.json", images)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a prompt asks about."""

    pictures: int
    side: int  # of each picture, in pixels
    questions: int = 1  # how often the question occurs


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A published model's architecture, small."""

    title: str
    save: Callable[[Path, int, int], None]  # directory, vocabulary, layers
    prompts: Mapping[int, Asked]  # by their approximate number of tokens


SHAPES = {
    "qwen2_5_vl": Shape(
        title="Qwen2.5-VL",
        save=save_checkpoint,
        prompts={280: Asked(pictures=1, side=448), 1180: Asked(pictures=1, side=952)},
    ),
    "qwen3_5": Shape(
        title="Qwen3.5",
        save=save_qwen3_5,
        prompts={280: Asked(pictures=1, side=512), 1180: Asked(pictures=1, side=1088)},
    ),
    "gemma3": Shape(
        title="Gemma 3",
        save=save_gemma3,
        prompts={280: Asked(pictures=1, side=896), 1180: Asked(pictures=4, side=896, questions=20)},
    ),
}


def save_processor(directory: Path, tokenizer: PreTrainedTokenizerFast, patches: dict[str, Any] = PATCHES) -> None:
    """Write the files of tokenizer, processor and generation of one of Qwen's models."""
    ids = {token: tokenizer.vocab[token] for token in SPECIAL_TOKENS}
    tokenizer.save_pretrained(directory)
    generation = {
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
        "do_sample": True,
        # Plain sampling: if a peer leaves top-k open, transformers would take 50.
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        # Without end tokens every completion has the requested length, and without image pads the peers' next forward
        # pass does not fail.
        "suppress_tokens": list(ids.values()),
    }
    _write(directory / "generation_config.json", generation)
    _write(directory / "preprocessor_config.json", patches | {"image_processor_type": "Qwen2VLImageProcessor"})
    _write(directory / "video_preprocessor_config.json", patches | {"video_processor_type": "Qwen2VLVideoProcessor"})


def _tokenizer_and_ids(vocabulary: int) -> tuple[PreTrainedTokenizerFast, dict[str, int]]:
    """Return the tokenizer with the ids of its special tokens, and seed the weights that come next."""
    tokenizer = make_tokenizer(vocabulary)
    torch.manual_seed(0)
    return tokenizer, {token: tokenizer.vocab[token] for token in SPECIAL_TOKENS}


def save_images(directory: Path, side: int, count: int) -> None:
    """Write `count` different square PNG files, 00.png and so on: soft random colours, as compressible as a
    photograph."""
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        colours = np.random.default_rng([side, number]).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        picture = Image.fromarray(colours).resize((side, side), Image.Resampling.BICUBIC)
        picture.save(directory / f"{number:02d}.png")


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--vocabulary", type=int, help="rows of the embedding; with --layers, write a checkpoint")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--side", type=int, help="pixels; write images")
    parser.add_argument("--count", type=int, default=1, help="how many images")
    arguments = parser.parse_args()
    if arguments.vocabulary is not None:
        save_checkpoint(arguments.directory, arguments.vocabulary, arguments.layers)
    if arguments.side is not None:
        save_images(arguments.directory, arguments.side, arguments.count)


if __name__ == "__main__":
    main()
