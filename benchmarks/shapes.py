"""What every framework is given to train: a checkpoint with random weights in Qwen2.5-VL's shape, and images.

    python -m benchmarks.shapes DIRECTORY --vocabulary 152064 --layers 8
    python -m benchmarks.shapes DIRECTORY --side 448 --count 4

Runs in tiercel's own environment, without torchvision; the processor's files are those of a published checkpoint, so
that AutoProcessor of the peers' environments reads them. Weights, tokenizer and images depend on the arguments alone.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from benchmarks.drivers.measuring import QUESTION, SYSTEM

HIDDEN_SIZE = 512
SPECIAL_TOKENS = (  # in a published checkpoint 151643 to 151656
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
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
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
    """Byte-level BPE that knows the prompt's words; fillers take the ids up to the first special token."""
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
    bpe.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE
    )


def make_config(vocabulary: int, layers: int, ids: dict[str, int]) -> Qwen2_5_VLConfig:
    """Qwen2.5-VL's architecture, small: 512 wide, 8 heads of 64, tied head. `ids`: of the special tokens."""
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": vocabulary,
            "hidden_size": HIDDEN_SIZE,
            "intermediate_size": 1376,
            "num_hidden_layers": layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 1e6},
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
            "tie_word_embeddings": True,
        },
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
        tie_word_embeddings=True,
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
    )


def save_checkpoint(directory: Path, vocabulary: int, layers: int) -> None:
    """Write config, weights, tokenizer and processor files."""
    tokenizer = make_tokenizer(vocabulary)
    ids = {token: tokenizer.vocab[token] for token in SPECIAL_TOKENS}
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(make_config(vocabulary, layers, ids)).float()
    model.save_pretrained(directory)
    save_processor(directory, tokenizer)


def save_processor(directory: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write the files of tokenizer, processor and generation."""
    ids = {token: tokenizer.vocab[token] for token in SPECIAL_TOKENS}
    tokenizer.save_pretrained(directory)
    generation = {
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
        "do_sample": True,
        # Plain sampling: where a peer leaves top-k open, transformers would take 50.
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        # Without end tokens every completion has the length asked for, and without image pads the peers' next
        # forward pass does not fail.
        "suppress_tokens": list(ids.values()),
    }
    _write(directory / "generation_config.json", generation)
    _write(directory / "preprocessor_config.json", PATCHES | {"image_processor_type": "Qwen2VLImageProcessor"})
    _write(directory / "video_preprocessor_config.json", PATCHES | {"video_processor_type": "Qwen2VLVideoProcessor"})


def save_images(directory: Path, side: int, count: int) -> None:
    """`count` different square PNG files, 00.png and so on: soft random colours, as compressible as a photograph."""
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
