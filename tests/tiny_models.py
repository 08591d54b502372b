"""Tiny random checkpoints of every family, saved in the real format."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    Ovis2Config,
    Ovis2ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tiercel.config.schema import Data, Lora, Model, SftRecipe, Train
from tiercel.models.families.base import Family
from tiercel.models.policy import Policy, build_policy
from tiercel.models.prompts import encode_prompt
from tiercel.models.vision_cache import VisionStore
from tiercel.types import EncodedImage, EncodedPrompt, ImageSource, Message, Row
from tools.demo.tokenizer import CHAT_TEMPLATE, QWEN_TOKENS, make_tokenizer

EXPERT_FAMILIES = ("qwen3_vl_moe", "qwen3_5_moe")
QWEN_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", *EXPERT_FAMILIES)
FAMILY_NAMES = (*QWEN_FAMILIES, "ovis2", "internvl", "llava_onevision", "gemma3", "gemma4")
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA_LAYERS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
TINY_LORA = Lora(rank=4, alpha=8)
WORDS = ("system", "user", "assistant", "Where", " is", " the", " seven", "?", *(str(n) for n in range(60)), "[1, 2]")
OVIS2_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<IMG_ATOM>",
    "<IMG_START>",
    "<IMG_GRID>",
    "<IMG_COL>",
    "<IMG_ROW>",
    "<IMG_END>",
    "<image>",
)
QWEN_TEMPLATE = CHAT_TEMPLATE.replace(
    "{% elif part",
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% elif part",
)
INTERNVL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<IMG_CONTEXT>", "<img>", "</img>", "<video>")
INTERNVL_NAMES = {  # names by which its processor asks the tokenizer for them
    "context_image_token": "<IMG_CONTEXT>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "video_token": "<video>",
}
GEMMA3_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<image_soft_token>",
    "<start_of_image>",
    "<end_of_image>",
    "\n\n\n\n",  # vLLM requires these as single tokens
    "\n\n\n",
    "\n\n",
    "\n",
)
GEMMA3_NAMES = {  # names by which its processor asks the tokenizer for them
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
}
GEMMA4_NAMES = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
GEMMA4_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|video|>", *GEMMA4_NAMES.values())
LLAVA_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
TILES_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}MARKER\n{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tiny_checkpoint(name: str, directory: Path, seed: int = 0, *, heads: int = 4) -> Path:
    """Write the named family's tiny checkpoint and return its directory. With 2 `heads` they are of size 32, the
    smallest that vLLM computes on a CPU."""
    torch.manual_seed(seed)
    model, tokenizer, image_processor = _qwen(name, heads) if name.startswith("qwen") else OTHERS[name](heads)
    scale = 2.0 if name.startswith("gemma") else 4.0  # Gemma multiplies its embeddings itself
    with torch.no_grad():  # initial weights are so small that every distribution would be flat
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(directory)
    _publish(name, directory / "model.safetensors")
    tokenizer.save_pretrained(directory)
    image_processor.save_pretrained(directory)
    return directory


def _publish(name: str, file: Path) -> None:
    """Give the weights the names and layout of published checkpoints, if transformers saves new models differently."""
    weights = load_file(file)
    if name == "gemma3":
        weights = {key.replace("vision_tower.", "vision_tower.vision_model."): each for key, each in weights.items()}
    if name == "qwen3_vl_moe":
        weights = {
            key: each.transpose(1, 2).contiguous() if ".experts." in key else each for key, each in weights.items()
        }
    save_file(weights, file, metadata={"format": "pt"})


def _text_config(vocabulary: int, tied: bool, heads: int = 4) -> dict:
    return {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "tie_word_embeddings": tied,
    }


def _qwen(name: str, heads: int):
    tokenizer = make_tokenizer(WORDS, QWEN_TOKENS, QWEN_TEMPLATE)
    ids = tokenizer.convert_tokens_to_ids
    shared = {
        "tie_word_embeddings": name == "qwen2_vl",
        "vision_start_token_id": ids("<|vision_start|>"),
        "vision_end_token_id": ids("<|vision_end|>"),
        "image_token_id": ids("<|image_pad|>"),
        "video_token_id": ids("<|video_pad|>"),
    }
    sections = {4: [2, 3, 3], 2: [4, 6, 6]}[heads]
    rope = {"rope_type": "default", "mrope_section": sections, "rope_theta": 10000.0}
    text = _text_config(len(tokenizer), shared["tie_word_embeddings"], heads) | {"rope_parameters": rope}
    text |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    patches = {"depth": 2, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    if name == "qwen2_vl":
        vision = patches | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
        model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **shared))
    elif name.startswith("qwen3_vl"):
        text |= {"head_dim": 64 // heads, "num_hidden_layers": 3}
        rope["mrope_interleaved"] = True
        vision = patches | {"depth": 3, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
        vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
        if name == "qwen3_vl":
            model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **shared))
        else:
            text |= EXPERTS | {"norm_topk_prob": True}  # vLLM requires it
            config = Qwen3VLMoeConfig(text_config=text, vision_config=vision, **shared)
            model = Qwen3VLMoeForConditionalGeneration(config)
    elif name.startswith("qwen3_5"):
        rope |= {"mrope_interleaved": True, "partial_rotary_factor": 1.0}
        text |= {
            "head_dim": 64 // heads,
            "num_hidden_layers": 4,
            "layer_types": DELTA_LAYERS,
            "linear_conv_kernel_dim": 4,
        }
        text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        size = 128 if heads == 2 else 16  # vLLM computes states of this size on a CPU
        text |= {"linear_key_head_dim": size, "linear_value_head_dim": size}
        vision = patches | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
        vision["num_position_embeddings"] = 16
        if name == "qwen3_5":
            model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision, **shared))
        else:
            text |= EXPERTS | {"shared_expert_intermediate_size": 32}
            config = Qwen3_5MoeConfig(text_config=text, vision_config=vision, **shared)
            model = Qwen3_5MoeForConditionalGeneration(config)
    else:
        vision = patches | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "window_size": 56}
        vision["fullatt_block_indexes"] = [1]
        model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **shared))
    return model.float(), tokenizer, Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=112 * 112)


def _ovis2(heads: int):
    tokenizer = make_tokenizer(WORDS, OVIS2_TOKENS, TILES_TEMPLATE.replace("MARKER", "<image>"))
    ids = tokenizer.convert_tokens_to_ids
    config = Ovis2Config(
        text_config=_tile_text(tokenizer, heads),
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
            "vocab_size": 64,
            "hidden_stride": 2,
            "num_visual_indicator_tokens": 5,
        },
        image_token_id=ids("<IMG_ATOM>"),
        visual_indicator_token_ids=[ids(token) for token in OVIS2_TOKENS[4:9]],
        vocab_size=len(tokenizer),
        hidden_size=64,
        tie_word_embeddings=True,
    )
    processor = Ovis2ImageProcessorPil(size={"height": 56, "width": 56}, crop_to_patches=True, max_patches=4)
    return Ovis2ForConditionalGeneration(config).float(), tokenizer, processor


def _tile_text(tokenizer, heads: int) -> dict:
    text = _text_config(len(tokenizer), True, heads) | {"model_type": "qwen2"}
    return text | {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}


def _internvl(heads: int):
    template = TILES_TEMPLATE.replace("MARKER", "<IMG_CONTEXT>")
    tokenizer = make_tokenizer(WORDS, INTERNVL_TOKENS, template, INTERNVL_NAMES)
    config = InternVLConfig(
        text_config=_tile_text(tokenizer, heads),
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": [56, 56],
            "patch_size": [14, 14],
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=True,
    )
    processor = GotOcr2ImageProcessorPil(size={"height": 56, "width": 56}, crop_to_patches=False, max_patches=4)
    return InternVLForConditionalGeneration(config).float(), tokenizer, processor


def _llava_onevision(heads: int):
    tokenizer = make_tokenizer(WORDS, LLAVA_TOKENS, TILES_TEMPLATE.replace("MARKER", "<image>"))
    pinpoints = [[56 * rows, 56 * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]
    config = LlavaOnevisionConfig(
        text_config=_tile_text(tokenizer, heads),
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
            "vision_use_head": False,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=pinpoints,
        vision_aspect_ratio="anyres_max_4",
        tie_word_embeddings=True,
    )
    processor = LlavaOnevisionImageProcessorPil(size={"height": 56, "width": 56}, image_grid_pinpoints=pinpoints)
    return LlavaOnevisionForConditionalGeneration(config).float(), tokenizer, processor


def _gemma3(heads: int):
    """A window of 8 tokens, shorter than each prompt and than some completions; the first layer has none."""
    tokenizer = make_tokenizer(
        WORDS, GEMMA3_TOKENS, TILES_TEMPLATE.replace("MARKER\n", "<start_of_image>"), GEMMA3_NAMES
    )
    text = _text_config(len(tokenizer), True, heads) | {"head_dim": 64 // heads, "query_pre_attn_scalar": 16}
    text |= {"num_hidden_layers": 3, "sliding_window": 8}
    text |= {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
    text |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Gemma3Config(
        text_config=text,
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
            "vision_use_head": False,
        },
        mm_tokens_per_image=4,
        image_token_id=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
        boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
        tie_word_embeddings=True,
    )
    model = Gemma3ForConditionalGeneration(config).float()
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.1)
    return model, tokenizer, Gemma3ImageProcessorPil(size={"height": 56, "width": 56})


def _gemma4(heads: int):
    """A window of 8 tokens, keys and values of two layers for the two after them, an embedding for each layer."""
    template = TILES_TEMPLATE.replace("MARKER\n", "<|image|>")
    tokenizer = make_tokenizer(WORDS, GEMMA4_TOKENS, template, GEMMA4_NAMES)
    ids = tokenizer.convert_tokens_to_ids
    kinds = ["sliding_attention", "full_attention"] * 2
    text = _text_config(len(tokenizer), True, heads) | {"num_hidden_layers": 4, "layer_types": kinds}
    text |= {"head_dim": 64 // heads, "global_head_dim": 128 // heads, "sliding_window": 8}
    text |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 2}
    text |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": len(tokenizer)}
    text |= {"final_logit_softcapping": 8.0, "use_bidirectional_attention": "vision"}
    text |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Gemma4Config(
        text_config=text,
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 512,
        },
        audio_config=None,
        image_token_id=ids("<|image|>"),
        video_token_id=ids("<|video|>"),
        audio_token_id=ids("<|audio|>"),
        boi_token_id=ids("<|image>"),
        eoi_token_id=ids("<image|>"),
        boa_token_id=ids("<|audio>"),
        eoa_token_index=ids("<audio|>"),
        tie_word_embeddings=True,
    )
    processor = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    model = Gemma4ForConditionalGeneration(config).float()
    for layer in model.model.language_model.layers:  # its scores are products of normed states without a scale
        torch.nn.init.constant_(layer.self_attn.q_norm.weight, 0.25)
    return model, tokenizer, processor


OTHERS = {
    "ovis2": _ovis2,
    "internvl": _internvl,
    "llava_onevision": _llava_onevision,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
}


def noise_image(width: int, height: int, seed: int) -> Image.Image:
    """An RGB picture of random pixels."""
    generator = torch.Generator().manual_seed(seed)
    return Image.fromarray(torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator).numpy())


MIXED_PICTURES = (noise_image(84, 56, 1), noise_image(56, 56, 2), noise_image(120, 50, 3))


def mixed_rows(family: Family) -> list[tuple[Row, list[EncodedImage]]]:
    """A text-only row, one with an image, one with two images of other shapes."""
    encoded = [family.encode_image(picture) for picture in MIXED_PICTURES]
    rows = []
    for number, images in enumerate(([], encoded[:1], encoded[1:])):
        content = "<image>" * len(images) + "Where is the seven?"
        rows.append((make_row(f"row-{number}", content, len(images)), images))
    return rows


def make_row(identity: str, content: str, image_count: int, answer: str | None = "[1, 20, 30, 40]") -> Row:
    """Return a row with a user turn, and with an assistant turn if an answer is given."""
    messages = [Message(role="user", content=content)]
    if answer is not None:
        messages.append(Message(role="assistant", content=answer))
    return Row(
        id=identity,
        messages=tuple(messages),
        images=tuple(ImageSource(path=f"{i}.png") for i in range(image_count)),
        answer=answer,
        columns={},
        file="rows.jsonl",
        line=1,
    )


def tiny_recipe(
    checkpoint: Path,
    *,
    dtype: str = "float32",
    quantize: str | None = None,
    template: str | None = None,
    **sections: Any,
) -> SftRecipe:
    """A recipe of a checkpoint on this disk, for `build_policy`."""
    return SftRecipe(
        model=Model(path=str(checkpoint), dtype=dtype, quantize=quantize),
        data=Data(train="rows.jsonl", template=template),
        train=Train(steps=1),
        output="run",
        **sections,
    )


class CountingPolicy:
    """A policy that counts the pictures whose features it computes."""

    def __init__(self, policy: Policy):
        self._policy = policy
        self.pictures = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def vision_features(self, images: Sequence[EncodedImage]) -> list[torch.Tensor]:
        self.pictures += len(images)
        return self._policy.vision_features(images)


def counting_store(policy: Policy, cache_bytes: int) -> VisionStore:
    """A vision store whose `policy.pictures` counts."""
    counting: Any = CountingPolicy(policy)
    return VisionStore(counting, cache_bytes)


def tiny_policy(checkpoint: Path, lora: Lora | None = TINY_LORA, *, noise: float = 0.0, **keys: Any) -> Policy:
    """The checkpoint with a fresh adapter, moved off zero by `noise`; without `lora` full fine-tuning."""
    policy = build_policy(tiny_recipe(checkpoint, lora=lora, **keys), torch.device("cpu"))
    if noise:
        move_adapter(policy, noise)
    return policy


def move_adapter(policy: Policy, scale: float, seed: int = 1) -> None:
    """Set the trained adapter's B matrices to normal noise, so that it changes every output."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.trained_parameters().items():
        if "lora_B" in name:
            parameter.data.normal_(0, scale, generator=generator)


def tiny_prompts(family: Family) -> list[EncodedPrompt]:
    """The prompts of `mixed_rows`: text only, one image, two images."""
    return [
        encode_prompt(family, row, number, images, system=None, max_prompt_tokens=400)
        for number, (row, images) in enumerate(mixed_rows(family))
    ]


def random_ids(family: Family, length: int, generator: torch.Generator) -> Tensor:
    """Token ids of a completion; never a vision placeholder."""
    allowed = [i for i in range(family.vocabulary_size) if i not in family.placeholder_ids]
    return torch.tensor(allowed)[torch.randint(len(allowed), (length,), generator=generator)]
