"""Tiny random checkpoints of architectures without their own family, saved in the real format."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.tiny_models import TILES_TEMPLATE, WORDS
from tools.demo.tokenizer import CHAT_TEMPLATE, make_tokenizer

TEXT = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
CLIP = TOWER | {"model_type": "clip_vision_model"}
SIGLIP = TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False}
PIXTRAL = TOWER | {"model_type": "pixtral", "head_dim": 16}
TEXT_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SQUARE = {"size": {"height": 56, "width": 56}}
CROP = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A tiny checkpoint. Values that begin with `id:` represent the id of a token."""

    model: str  # classes of transformers
    config: str
    processor: str | None = None  # None: text only
    images: str | None = None
    tokens: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)  # names by which its processor asks the tokenizer for them
    marker: str = "<image>"  # what the template writes in place of an image
    keys: Mapping[str, Any] = field(default_factory=dict)  # of the config
    image_keys: Mapping[str, Any] = field(default_factory=dict)
    processor_keys: Mapping[str, Any] = field(default_factory=dict)
    videos: str | None = None
    start: bool = False  # whether the tokenizer has a token for the start of a text


def _with_ids(value: Any, tokenizer: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_ids(each, tokenizer) for key, each in value.items()}
    if isinstance(value, str) and value.startswith("id:"):
        return tokenizer.convert_tokens_to_ids(value[3:])
    return value


def has_processor(name: str) -> bool:
    """Return whether the processor can be made, because transformers has stand-ins for parts whose packages are
    missing."""
    tiny = GENERIC[name]
    parts = [getattr(transformers, part, None) for part in (tiny.images, tiny.videos, tiny.processor) if part]
    return not any(part is None or getattr(part, "is_dummy", False) for part in parts)


def save_generic_checkpoint(tiny: Tiny, directory: Path, seed: int = 0) -> Path:
    """Write a tiny checkpoint and return its directory."""
    torch.manual_seed(seed)
    template = CHAT_TEMPLATE if tiny.processor is None else TILES_TEMPLATE.replace("MARKER", tiny.marker)
    tokenizer = make_tokenizer(WORDS, TEXT_TOKENS + tiny.tokens, template, tiny.names)
    if tiny.start:
        tokenizer.bos_token = "<|endoftext|>"
    text = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    text["eos_token_id"] = tokenizer.eos_token_id
    keys = _with_ids(tiny.keys, tokenizer)
    config_class = getattr(transformers, tiny.config)
    keys = keys | ({"text_config": text | keys["text_config"]} if "text_config" in keys else text)
    model = getattr(transformers, tiny.model)(config_class(**keys)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(directory)
    if tiny.processor is None:
        tokenizer.save_pretrained(directory)
        return directory
    parts = {"image_processor": getattr(transformers, tiny.images)(**tiny.image_keys), "tokenizer": tokenizer}
    parts["image_processor"].image_seq_length = 16  # PaliGemma's processor reads it there
    if tiny.videos is not None:
        parts["video_processor"] = getattr(transformers, tiny.videos)()
    processor = getattr(transformers, tiny.processor)(**parts, chat_template=template, **tiny.processor_keys)
    processor.save_pretrained(directory)
    return directory


IDEFICS_TOKENS = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)
COHERE_TOKENS = (
    "<image>",
    "<|START_OF_IMG|>",
    "<|END_OF_IMG|>",
    "<|IMG_LINE_BREAK|>",
    "<|IMG_PATCH|>",
    "TILE",
    "TILE_GLOBAL",
    *(f"TILE_{number}" for number in range(1, 13)),
)
LLAVA_PROCESSOR = {
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
TEXT_KEYS = {key: value for key, value in TEXT.items() if key != "model_type"}


def idefics(tower: str) -> dict[str, Any]:
    """What Idefics 3 and SmolVLM have in common; `tower` is the type of the vision model."""
    return {
        "tokens": IDEFICS_TOKENS,
        "keys": {
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": TOWER | {"model_type": tower},
            "image_token_id": "id:<image>",
            "scale_factor": 2,
        },
        "image_keys": {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}},
        "processor_keys": {"image_seq_len": 4},
    }


GLM = {
    "tokens": ("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"),
    "names": {"image_token": "<|image|>", "video_token": "<|video|>"},
    "marker": "<|begin_of_image|><|image|><|end_of_image|>",
    "keys": {
        "text_config": TEXT
        | {
            "model_type": "glm4v_text",
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "image_size": 56,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "image_token_id": "id:<|image|>",
        "video_token_id": "id:<|video|>",
        "image_start_token_id": "id:<|begin_of_image|>",
        "image_end_token_id": "id:<|end_of_image|>",
    },
    "image_keys": {"size": {"shortest_edge": 28 * 28 * 2, "longest_edge": 112 * 112 * 2}},
}


GLM_46V = {  # as GLM-4.6V is published: the classes of GLM-4.1V and GLM-4.5V, and a processor of its own
    "processor": "Glm46VProcessor",
    "images": "Glm46VImageProcessorPil",
    "videos": "Glm46VVideoProcessor",
}
GLM_EXPERTS = {
    "model_type": "glm4v_moe_text",
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [1, 1, 2],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
MINICPM_NAMES = {  # names by which its processor asks the tokenizer for them
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
KIMI_TOKENS = (
    "<|media_pad|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|kimi_k25_video_placeholder|>",
)
# These must be accepted.
NAMED = (
    "glm46v",
    "glm46v_flash",
    "glm46v_moe",
    "minicpmv4_6",
    "kimi_k25",
    "smolvlm",
    "idefics3",
    "mistral3",
    "pixtral",
    "llava",
)

GENERIC = {
    "llava": Tiny(
        model="LlavaForConditionalGeneration",
        config="LlavaConfig",
        processor="LlavaProcessor",
        images="CLIPImageProcessorPil",
        tokens=("<image>",),
        keys={
            "text_config": TEXT,
            "vision_config": CLIP,
            "image_token_id": "id:<image>",
            "image_seq_length": 16,
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
        },
        image_keys=CROP,
        processor_keys=LLAVA_PROCESSOR,
    ),
    "mistral3": Tiny(
        model="Mistral3ForConditionalGeneration",
        config="Mistral3Config",
        processor="PixtralProcessor",
        images="PixtralImageProcessorPil",
        tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        marker="[IMG]",
        keys={
            "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
            "vision_config": PIXTRAL,
            "image_token_id": "id:[IMG]",
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
        },
        image_keys={"size": {"longest_edge": 112}, "patch_size": {"height": 14, "width": 14}},
        processor_keys={"patch_size": 14, "spatial_merge_size": 2},
    ),
    "idefics3": Tiny(
        model="Idefics3ForConditionalGeneration",
        config="Idefics3Config",
        processor="Idefics3Processor",
        images="Idefics3ImageProcessorPil",
        **idefics("idefics3_vision"),
    ),
    "llava_next": Tiny(
        model="LlavaNextForConditionalGeneration",
        config="LlavaNextConfig",
        processor="LlavaNextProcessor",
        images="LlavaNextImageProcessorPil",
        tokens=("<image>",),
        keys={
            "text_config": TEXT,
            "vision_config": CLIP,
            "image_token_id": "id:<image>",
            "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
        },
        image_keys=CROP | {"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]},
        processor_keys=LLAVA_PROCESSOR,
    ),
    "glm46v": Tiny(
        model="Glm46VForConditionalGeneration",
        config="Glm46VConfig",
        processor="Glm46VProcessor",
        images="Glm46VImageProcessorPil",
        videos="Glm46VVideoProcessor",
        **GLM,
    ),
    "smolvlm": Tiny(
        model="SmolVLMForConditionalGeneration",
        config="SmolVLMConfig",
        processor="SmolVLMProcessor",
        images="SmolVLMImageProcessorPil",
        videos="SmolVLMVideoProcessor",
        names={"fake_image_token": "<fake_token_around_image>", "image_token": "<image>"},
        **idefics("smolvlm_vision"),
    ),
    "glm4v": Tiny(
        model="Glm4vForConditionalGeneration",
        config="Glm4vConfig",
        processor="Glm4vProcessor",
        images="Glm4vImageProcessorPil",
        videos="Glm4vVideoProcessor",
        **GLM,
    ),
    "glm46v_flash": Tiny(model="Glm4vForConditionalGeneration", config="Glm4vConfig", **GLM_46V, **GLM),
    "glm46v_moe": Tiny(
        model="Glm4vMoeForConditionalGeneration",
        config="Glm4vMoeConfig",
        **GLM_46V,
        **GLM | {"keys": GLM["keys"] | {"text_config": TEXT | GLM_EXPERTS}},
    ),
    "minicpmv4_6": Tiny(
        model="MiniCPMV4_6ForConditionalGeneration",
        config="MiniCPMV4_6Config",
        processor="MiniCPMV4_6Processor",
        images="MiniCPMV4_6ImageProcessorPil",
        videos="MiniCPMV4_6VideoProcessor",
        tokens=tuple(MINICPM_NAMES.values()),
        names=MINICPM_NAMES,
        marker="<|image_pad|>",
        keys={
            "text_config": TEXT
            | {
                "model_type": "qwen3_5_text",
                "head_dim": 16,
                "num_hidden_layers": 4,
                "layer_types": ["linear_attention"] * 3 + ["full_attention"],
                "linear_conv_kernel_dim": 4,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 10000.0,
                    "partial_rotary_factor": 0.25,
                    "mrope_section": [1, 1, 0],
                },
            },
            "vision_config": TOWER | {"num_hidden_layers": 3, "image_size": 112},
            "image_size": 112,
            "insert_layer_id": 1,
            "image_token_id": "id:<|image_pad|>",
            "video_token_id": "id:<|video_pad|>",
        },
        image_keys={"scale_resolution": 112, "max_slice_nums": 4, "patch_size": 14},
    ),
    "kimi_k25": Tiny(
        model="Kimi_K25ForConditionalGeneration",
        config="Kimi_K25Config",
        processor="Kimi_K25Processor",
        images="Kimi_K25ImageProcessor",
        videos="Kimi_K25VideoProcessor",
        tokens=KIMI_TOKENS,
        marker="<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
        keys={
            "text_config": TEXT
            | {
                "model_type": "deepseek_v3",
                "num_key_value_heads": 4,
                "moe_intermediate_size": 24,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "n_shared_experts": 1,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "kv_lora_rank": 16,
                "q_lora_rank": 16,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 16,
            },
            "vision_config": {key: value for key, value in TOWER.items() if key != "image_size"}
            | {"pos_emb_height": 8, "pos_emb_width": 8},
            "projection_hidden_size": 32,
            "image_token_id": "id:<|media_pad|>",
            "video_token_id": "id:<|kimi_k25_video_placeholder|>",
            "vision_start_token_id": "id:<|media_begin|>",
            "vision_end_token_id": "id:<|media_end|>",
            "tie_word_embeddings": False,
        },
    ),
    "vipllava": Tiny(
        model="VipLlavaForConditionalGeneration",
        config="VipLlavaConfig",
        processor="LlavaProcessor",
        images="CLIPImageProcessorPil",
        tokens=("<image>",),
        keys={
            "text_config": TEXT,
            "vision_config": CLIP,
            "image_token_id": "id:<image>",
            "image_seq_length": 16,
            "vision_feature_layers": [-2, -1],
        },
        image_keys=CROP,
        processor_keys=LLAVA_PROCESSOR,
    ),
    "aya_vision": Tiny(
        model="AyaVisionForConditionalGeneration",
        config="AyaVisionConfig",
        processor="AyaVisionProcessor",
        images="GotOcr2ImageProcessorPil",
        tokens=COHERE_TOKENS,
        keys={
            "text_config": TEXT,
            "vision_config": SIGLIP,
            "image_token_id": "id:<|IMG_PATCH|>",
            "downsample_factor": 2,
        },
        image_keys=SQUARE | {"crop_to_patches": True, "max_patches": 4},
        processor_keys={"patch_size": 28, "img_size": 56},
    ),
    "lighton_ocr": Tiny(
        model="LightOnOcrForConditionalGeneration",
        config="LightOnOcrConfig",
        processor="LightOnOcrProcessor",
        images="PixtralImageProcessorPil",
        tokens=("<|image_pad|>", "<|vision_pad|>", "<|vision_end|>"),
        names={
            "image_token": "<|image_pad|>",
            "image_break_token": "<|vision_pad|>",
            "image_end_token": "<|vision_end|>",
        },
        marker="<|image_pad|>",
        keys={
            "text_config": TEXT | {"model_type": "qwen3", "head_dim": 16},
            "vision_config": PIXTRAL,
            "image_token_id": "id:<|image_pad|>",
            "spatial_merge_size": 2,
        },
        image_keys={"size": {"longest_edge": 112}, "patch_size": {"height": 14, "width": 14}},
        processor_keys={"patch_size": 14, "spatial_merge_size": 2},
    ),
    "paligemma": Tiny(
        start=True,
        model="PaliGemmaForConditionalGeneration",
        config="PaliGemmaConfig",
        processor="PaliGemmaProcessor",
        images="SiglipImageProcessorPil",
        tokens=("<image>",),
        names={"image_token": "<image>"},
        keys={
            "text_config": TEXT | {"model_type": "gemma", "head_dim": 16},
            "vision_config": SIGLIP | {"projection_dim": 64},
            "image_token_id": "id:<image>",
            "projection_dim": 64,
        },
        image_keys=SQUARE,
    ),
    "pixtral": Tiny(
        model="LlavaForConditionalGeneration",
        config="LlavaConfig",
        processor="PixtralProcessor",
        images="PixtralImageProcessorPil",
        tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        marker="[IMG]",
        keys={
            "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
            "vision_config": PIXTRAL,
            "image_token_id": "id:[IMG]",
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        image_keys={"size": {"longest_edge": 112}, "patch_size": {"height": 14, "width": 14}},
        processor_keys={"patch_size": 14, "spatial_merge_size": 1},
    ),
    "cohere2_vision": Tiny(
        model="Cohere2VisionForConditionalGeneration",
        config="Cohere2VisionConfig",
        processor="Cohere2VisionProcessor",
        images="Cohere2VisionImageProcessor",
        tokens=COHERE_TOKENS,
        names={
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "image_token": "<|IMG_PATCH|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
        marker="<|IMG_PATCH|>",
        keys={
            "text_config": TEXT | {"model_type": "cohere2", "sliding_window": 8},
            "vision_config": SIGLIP,
            "image_token_id": "id:<|IMG_PATCH|>",
            "downsample_factor": 2,
            "alignment_intermediate_size": 64,
        },
        image_keys=SQUARE | {"max_patches": 4, "patch_size": 2},
    ),
    "deepseek_vl": Tiny(
        model="DeepseekVLForConditionalGeneration",
        config="DeepseekVLConfig",
        processor="DeepseekVLProcessor",
        images="DeepseekVLImageProcessorPil",
        tokens=("<image>",),
        names={"image_token": "<image>"},
        keys={
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": SIGLIP,
            "image_token_id": "id:<image>",
        },
        image_keys=SQUARE,
        processor_keys={"num_image_tokens": 16},
    ),
    "janus": Tiny(
        model="JanusForConditionalGeneration",
        config="JanusConfig",
        processor="JanusProcessor",
        images="JanusImageProcessorPil",
        tokens=("<image>", "<begin>", "<end>"),
        names={"image_token": "<image>", "boi_token": "<begin>", "eoi_token": "<end>"},
        keys={
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": TOWER
            | {"model_type": "janus_vision_model", "projection_dim": 64, "num_image_tokens": 16, "depth": 2},
            "image_token_id": "id:<image>",
        },
        image_keys=SQUARE,
        processor_keys={"num_image_tokens": 16},
    ),
    "llava_next_video": Tiny(
        model="LlavaNextVideoForConditionalGeneration",
        config="LlavaNextVideoConfig",
        processor="LlavaNextVideoProcessor",
        images="LlavaNextImageProcessorPil",
        videos="LlavaNextVideoVideoProcessor",
        tokens=("<image>", "<video>"),
        keys={
            "text_config": TEXT,
            "vision_config": CLIP,
            "image_token_id": "id:<image>",
            "video_token_id": "id:<video>",
            "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
        },
        image_keys=CROP | {"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]},
        processor_keys=LLAVA_PROCESSOR,
    ),
    "lfm2_vl": Tiny(
        model="Lfm2VlForConditionalGeneration",
        config="Lfm2VlConfig",
        processor="Lfm2VlProcessor",
        images="Lfm2VlImageProcessor",
        tokens=("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
        names={
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail": "<|img_thumbnail|>",
        },
        keys={
            "text_config": TEXT | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
            "vision_config": TOWER | {"model_type": "siglip2_vision_model", "num_patches": 64},
            "image_token_id": "id:<image>",
            "projector_hidden_size": 64,
        },
        image_keys={"max_image_tokens": 16, "min_image_tokens": 4, "encoder_patch_size": 14, "tile_size": 112},
    ),
    "got_ocr2": Tiny(
        model="GotOcr2ForConditionalGeneration",
        config="GotOcr2Config",
        processor="GotOcr2Processor",
        images="GotOcr2ImageProcessorPil",
        tokens=("<img>", "</img>", "<imgpad>"),
        marker="<imgpad>",
        keys={
            "text_config": TEXT,
            "vision_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 48},
            "image_token_id": "id:<imgpad>",
        },
        image_keys=SQUARE,
    ),
    "qwen3_moe": Tiny(
        model="Qwen3MoeForCausalLM",
        config="Qwen3MoeConfig",
        keys=TEXT_KEYS | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "mixtral": Tiny(
        model="MixtralForCausalLM",
        config="MixtralConfig",
        keys=TEXT_KEYS | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen2_text": Tiny(model="Qwen2ForCausalLM", config="Qwen2Config", keys=TEXT_KEYS),
    "qwen3": Tiny(model="Qwen3ForCausalLM", config="Qwen3Config", keys=TEXT_KEYS | {"head_dim": 16}),
    "llama": Tiny(model="LlamaForCausalLM", config="LlamaConfig", keys=TEXT_KEYS),
    "mistral": Tiny(model="MistralForCausalLM", config="MistralConfig", keys=TEXT_KEYS | {"sliding_window": None}),
    "mistral_sliding": Tiny(model="MistralForCausalLM", config="MistralConfig", keys=TEXT_KEYS | {"sliding_window": 8}),
    "gemma": Tiny(model="GemmaForCausalLM", config="GemmaConfig", keys=TEXT_KEYS | {"head_dim": 16}),
    "gemma2": Tiny(
        model="Gemma2ForCausalLM",
        config="Gemma2Config",
        keys=TEXT_KEYS | {"head_dim": 16, "sliding_window": 8, "final_logit_softcapping": 3.0},
    ),
    "gemma3_text": Tiny(
        model="Gemma3ForCausalLM", config="Gemma3TextConfig", keys=TEXT_KEYS | {"head_dim": 16, "sliding_window": 8}
    ),
    "olmo2": Tiny(model="Olmo2ForCausalLM", config="Olmo2Config", keys=TEXT_KEYS),
    "phi3": Tiny(model="Phi3ForCausalLM", config="Phi3Config", keys=TEXT_KEYS),
    "phi": Tiny(model="PhiForCausalLM", config="PhiConfig", keys=TEXT_KEYS),
    "granite": Tiny(model="GraniteForCausalLM", config="GraniteConfig", keys=TEXT_KEYS | {"logits_scaling": 4.0}),
    "smollm3": Tiny(model="SmolLM3ForCausalLM", config="SmolLM3Config", keys=TEXT_KEYS),
    "gpt_oss": Tiny(
        model="GptOssForCausalLM",
        config="GptOssConfig",
        keys=TEXT_KEYS | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "mamba": Tiny(model="MambaForCausalLM", config="MambaConfig", keys=TEXT_KEYS),
    "gpt2": Tiny(model="GPT2LMHeadModel", config="GPT2Config", keys={"n_embd": 64, "n_layer": 2, "n_head": 4}),
    "bloom": Tiny(model="BloomForCausalLM", config="BloomConfig", keys={"hidden_size": 64, "n_layer": 2, "n_head": 4}),
}
