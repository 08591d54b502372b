"""Hugging Face's whole processors of the tiny checkpoints, some of which need torchvision."""

import transformers

from tiercel.models.families.base import Family

GEMMA4_SIZES = ("patch_size", "pooling_kernel_size", "max_soft_tokens")


def full_processor(family: Family):
    """The family's whole processor, images by torchvision."""
    checkpoint = family.checkpoint
    if family.name == "ovis2":
        images = transformers.Ovis2ImageProcessor(
            size=dict(checkpoint.image_processor.size), crop_to_patches=True, max_patches=4
        )
        return transformers.Ovis2Processor(
            image_processor=images,
            tokenizer=checkpoint.tokenizer,
            chat_template=checkpoint.chat_template,
            image_seq_length=family.tokens_per_tile,
        )
    if family.name == "internvl":
        images = transformers.GotOcr2ImageProcessor(
            size=dict(checkpoint.image_processor.size), crop_to_patches=False, max_patches=4
        )
        return transformers.InternVLProcessor(
            image_processor=images,
            tokenizer=checkpoint.tokenizer,
            video_processor=transformers.InternVLVideoProcessor(),
            image_seq_length=checkpoint.config.image_seq_length,
            chat_template=checkpoint.chat_template,
        )
    if family.name == "llava_onevision":
        pinpoints = checkpoint.image_processor.image_grid_pinpoints
        images = transformers.LlavaOnevisionImageProcessor(
            size={"height": 56, "width": 56}, image_grid_pinpoints=pinpoints
        )
        return transformers.LlavaOnevisionProcessor(
            image_processor=images,
            tokenizer=checkpoint.tokenizer,
            video_processor=transformers.LlavaOnevisionVideoProcessor(),
            num_image_tokens=16,
            vision_feature_select_strategy="full",
            vision_aspect_ratio=checkpoint.config.vision_aspect_ratio,
            chat_template=checkpoint.chat_template,
        )
    if family.name == "gemma3":
        return transformers.Gemma3Processor(
            image_processor=transformers.Gemma3ImageProcessor(size=dict(checkpoint.image_processor.size)),
            tokenizer=checkpoint.tokenizer,
            chat_template=checkpoint.chat_template,
            image_seq_length=checkpoint.config.mm_tokens_per_image,
        )
    if family.name == "gemma4":
        sizes = {name: getattr(checkpoint.image_processor, name) for name in GEMMA4_SIZES}
        return transformers.Gemma4Processor(
            feature_extractor=transformers.Gemma4AudioFeatureExtractor(),
            image_processor=transformers.Gemma4ImageProcessor(**sizes),
            tokenizer=checkpoint.tokenizer,
            video_processor=transformers.Gemma4VideoProcessor(),
            chat_template=checkpoint.chat_template,
        )
    size = checkpoint.image_processor.size
    images = transformers.Qwen2VLImageProcessor(min_pixels=size["shortest_edge"], max_pixels=size["longest_edge"])
    videos = transformers.Qwen3VLVideoProcessor if "qwen3" in family.name else transformers.Qwen2VLVideoProcessor
    chosen = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL"}.get(family.name, "Qwen3VL")  # Qwen3.5 has that too
    return getattr(transformers, f"{chosen}Processor")(
        image_processor=images,
        tokenizer=checkpoint.tokenizer,
        video_processor=videos(patch_size=14, image_mean=images.image_mean, image_std=images.image_std),
        chat_template=checkpoint.chat_template,
    )
