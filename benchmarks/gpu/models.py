"""Qwen2.5-VL in its published sizes with random weights, made on the device where they are used."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tiercel.config.schema import Lora
from tiercel.models.families.base import Checkpoint
from tiercel.models.families.qwen2_vl import Qwen25VL
from tiercel.models.layers.attention import route_attention
from tiercel.models.layers.tower_attention import route_tower
from tiercel.models.policy import Policy, leave_casting_to_autocast
from tiercel.models.weights.targets import adapter_targets
from tiercel.types import EncodedImage
from tools.demo.tokenizer import make_tokenizer

LORA_NOISE = 0.02  # standard deviation of the adapters' B matrices, so that no gradient is zero


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The numbers of a config.json."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    first_special_token: int  # id of <|endoftext|>; the others follow
    is_tied: bool
    rope_sections: tuple[int, int, int]
    vision_depth: int
    vision_hidden: int
    vision_intermediate: int
    vision_heads: int
    vision_whole_blocks: tuple[int, ...]  # blocks that attend over the whole image
    lora_rank: int


MODELS = {
    "3b": ModelShape(
        hidden=2048,
        intermediate=11008,
        layers=36,
        heads=16,
        key_heads=2,
        vocabulary=151_936,
        first_special_token=151_643,
        is_tied=True,
        rope_sections=(16, 24, 24),
        vision_depth=32,
        vision_hidden=1280,
        vision_intermediate=3420,
        vision_heads=16,
        vision_whole_blocks=(7, 15, 23, 31),
        lora_rank=64,
    ),
    "7b": ModelShape(
        hidden=3584,
        intermediate=18944,
        layers=28,
        heads=28,
        key_heads=4,
        vocabulary=152_064,
        first_special_token=151_643,
        is_tied=False,
        rope_sections=(16, 24, 24),
        vision_depth=32,
        vision_hidden=1280,
        vision_intermediate=3420,
        vision_heads=16,
        vision_whole_blocks=(7, 15, 23, 31),
        lora_rank=64,
    ),
    "toy": ModelShape(
        hidden=64,
        intermediate=96,
        layers=2,
        heads=4,
        key_heads=2,
        vocabulary=320,
        first_special_token=300,
        is_tied=True,
        rope_sections=(2, 3, 3),
        vision_depth=2,
        vision_hidden=32,
        vision_intermediate=48,
        vision_heads=2,
        vision_whole_blocks=(1,),
        lora_rank=4,
    ),
}


def make_config(shape: ModelShape) -> Qwen2_5_VLConfig:
    first = shape.first_special_token
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": shape.vocabulary,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.key_heads,
            "max_position_embeddings": 128_000,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": list(shape.rope_sections),
                "rope_theta": 1e6,
            },
            "bos_token_id": first,
            "eos_token_id": first + 2,
            "pad_token_id": first,
            "tie_word_embeddings": shape.is_tied,
        },
        vision_config={
            "depth": shape.vision_depth,
            "hidden_size": shape.vision_hidden,
            "intermediate_size": shape.vision_intermediate,
            "num_heads": shape.vision_heads,
            "out_hidden_size": shape.hidden,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": list(shape.vision_whole_blocks),
        },
        tie_word_embeddings=shape.is_tied,
        vision_start_token_id=first + 9,
        vision_end_token_id=first + 10,
        image_token_id=first + 12,
        video_token_id=first + 13,
    )


class KeepsPatches(Qwen25VL):
    """Makes each picture's patches once and keeps them, so that no compared learner makes them while it is timed."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.made: dict[str, Tensor] = {}

    def make_beforehand(self, images: Sequence[EncodedImage], policy: Policy) -> None:
        """Make the patches of pictures that a step will show."""
        weight = next(policy.model.model.visual.parameters())
        for image in images:
            self.patches(image, weight.device, weight.dtype)

    def patches(self, image: EncodedImage, device: torch.device, dtype: torch.dtype) -> Tensor:
        if image.sha256 not in self.made:
            self.made[image.sha256] = super().patches(image, device, dtype)
        return self.made[image.sha256]


def random_policy(shape: ModelShape, device: torch.device, dtype: torch.dtype) -> Policy:
    """Return a policy with frozen weights in `dtype`, and float32 LoRA on every linear layer of the decoder, as tiercel
    trains them."""
    config = make_config(shape)
    family = KeepsPatches(
        Checkpoint(
            path="",
            config=config,
            tokenizer=make_tokenizer([]),
            image_processor=Qwen2VLImageProcessorPil(),
            chat_template="",
            end_token_ids=(shape.first_special_token + 2, shape.first_special_token),
        ),
        min_pixels=None,
        max_pixels=None,
    )
    torch.manual_seed(0)
    with device:
        model = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=dtype, attn_implementation="sdpa")
        model.requires_grad_(False)
        route_attention(family.language_model(model))
        route_tower(family.tower_of_spans(model))
        lora = Lora(rank=shape.lora_rank, alpha=2 * shape.lora_rank)
        peft = get_peft_model(model, adapter_targets(family, model, lora).config(lora))
        leave_casting_to_autocast(model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, LORA_NOISE)
    return Policy(
        family=family,
        model=model.to(device).eval(),
        peft=peft,
        reference_adapter=None,
        compute_dtype=dtype,
        device=device,
    )


def decode_weight_bytes(policy: Policy) -> int:
    """Return the bytes of the weights that a decoding step reads, adapters and head included. It reads only a few rows
    of the embedding."""
    embedding = policy.model.get_input_embeddings().weight
    decoder = policy.family.language_model(policy.model).parameters()
    head = policy.model.get_output_embeddings().weight
    return head.nbytes + sum(parameter.nbytes for parameter in decoder if parameter is not embedding)
