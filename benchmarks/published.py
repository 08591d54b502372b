"""Configs of published checkpoints with the values of their config.json, for plans, which need nothing else of them."""

from pathlib import Path
from typing import Any

from transformers import Ovis2Config, Qwen2_5_VLConfig, Qwen2VLConfig

SIZES = {  # hidden, intermediate, layers, heads, key heads, vocabulary, tied
    "0.5b": (896, 4864, 24, 14, 2, 151_936, True),
    "1.5b": (1536, 8960, 28, 12, 2, 151_936, True),
    "3b": (2048, 11008, 36, 16, 2, 151_936, True),
    "7b": (3584, 18944, 28, 28, 4, 152_064, False),
    "32b": (5120, 27648, 64, 40, 8, 152_064, False),
    "72b": (8192, 29568, 80, 64, 8, 152_064, False),
}
ROPE = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}


def save_config(family: str, size: str, directory: Path) -> Path:
    """Create a directory with this config.json and nothing else, and return it."""
    hidden, intermediate, layers, heads, key_heads, vocabulary, tied = SIZES[size]
    text: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }
    if family == "qwen2_5_vl":
        vision = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
        vision |= {"out_hidden_size": hidden, "fullatt_block_indexes": [7, 15, 23, 31]}
        config = Qwen2_5_VLConfig(
            text_config=text | {"rope_parameters": ROPE}, vision_config=vision, tie_word_embeddings=tied
        )
    elif family == "qwen2_vl":
        vision = {"depth": 32, "embed_dim": 1280, "hidden_size": hidden, "mlp_ratio": 4, "num_heads": 16}
        config = Qwen2VLConfig(
            text_config=text | {"rope_parameters": ROPE}, vision_config=vision, tie_word_embeddings=tied
        )
    else:
        config = Ovis2Config(
            text_config=text | {"model_type": "qwen2"},
            hidden_size=hidden,
            vocab_size=vocabulary,
            tie_word_embeddings=tied,
        )
    config.save_pretrained(directory)
    return directory
