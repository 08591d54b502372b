"""Tiny checkpoints whose random policy calls tools: each of some whole calls is one token of the vocabulary."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

from tests.models.test_turns import WITH_TOOLS

PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
SEED = 3


def call(name: str, **arguments: Any) -> str:
    """A tool call as the template's form has it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def save_calling_checkpoint(tiny: Path, directory: Path, calls: Sequence[str]) -> Path:
    """Write the tiny Qwen2.5-VL checkpoint with these calls in its vocabulary and a template that writes tool calls."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    before = len(tokenizer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in calls])
    tokenizer.chat_template = WITH_TOOLS.replace("MARKER", PICTURE)
    torch.manual_seed(SEED)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        for weights in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            weights[before:] = weights[:before].std() * torch.randn_like(weights[before:])
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    Qwen2VLImageProcessorPil.from_pretrained(tiny).save_pretrained(directory)
    return directory
