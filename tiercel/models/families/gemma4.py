"""Gemma 4: pictures in their own shape, up to a number of tokens; 1-D positions; windows in most layers.

In the larger models, the tokens of a picture see each other in the layers with a window. The smaller models have an
embedding of each token for each layer. Shape suffixes: docs/shapes.md. D is 1.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)

from tiercel.devices import moved
from tiercel.errors import DataError
from tiercel.models.families.base import Family, HuggingFaceModel
from tiercel.models.families.image_transforms import normalised
from tiercel.models.layers.attention_span import Span, runs
from tiercel.types import EncodedImage, ImagePlan, PixelLimits, Size


class TokenAndLayerEmbedding(nn.Module):
    """The embedding of tokens, followed by their embeddings for each layer. Placeholders are embedded as padding."""

    def __init__(self, language_model: Any, placeholder_ids: Sequence[int]):
        super().__init__()
        self.tokens = language_model.embed_tokens
        self.layers = language_model.embed_tokens_per_layer
        self.padding = language_model.config.pad_token_id
        self.placeholder_ids = placeholder_ids

    @property
    def weight(self) -> Tensor:
        return self.tokens.weight

    def forward(self, token_ids: Tensor) -> Tensor:
        for placeholder in self.placeholder_ids:
            token_ids = token_ids.masked_fill(token_ids == placeholder, self.padding)
        return torch.cat([self.tokens(token_ids), self.layers(token_ids)], dim=-1)


class Gemma4(Family):
    """Gemma 4 with pictures."""

    name = "gemma4"
    serves = "Gemma 4 with pictures, such as `google/gemma-4-E2B-it`"
    special = "the picture's own shape, up to `max_soft_tokens`; windows; capped logits; embeddings for each layer"
    vllm = "tried once in process, on a CPU: another number of tokens for a picture, which the gate refuses"
    part_prefixes: ClassVar = {
        "vision": ("model.vision_tower.", "model.audio_tower."),
        "projector": ("model.embed_vision.", "model.embed_audio."),
    }
    image_marker = "<|image|>"
    sizes = "fits every image into `max_soft_tokens` of its processor"
    image_processor_class = Gemma4ImageProcessorPil

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        config = self.checkpoint.config
        return config.image_token_id, config.video_token_id, config.audio_token_id

    def plan_image(self, size: Size, limits: PixelLimits | None = None) -> ImagePlan:
        self.refuse_limits(limits)
        processor, (width, height) = self.checkpoint.image_processor, size
        patch, pooling = processor.patch_size, processor.pooling_kernel_size
        try:
            height, width = get_aspect_ratio_preserving_size(
                height, width, patch, processor.max_soft_tokens * pooling**2, pooling
            )
        except ValueError as error:
            raise DataError(f"image of {size[0]} x {size[1]} pixels: {error}", field="images") from error
        rows, columns = height // patch, width // patch
        return ImagePlan(
            original_size=size,
            processed_size=(width, height),
            grid=(rows, columns),
            token_count=rows * columns // pooling**2 + 2,
        )

    def image_token_ids(self, plan: ImagePlan) -> list[int]:
        config = self.checkpoint.config
        return [config.boi_token_id, *[config.image_token_id] * (plan.token_count - 2), config.eoi_token_id]

    def picture_spans(self, token_ids_P: Tensor) -> tuple[Span, ...]:
        if self.checkpoint.config.text_config.use_bidirectional_attention != "vision":
            return ()
        return runs(self.is_placeholder(token_ids_P))

    def vision_features(self, model: HuggingFaceModel, images: Sequence[EncodedImage]) -> list[Tensor]:
        weight = next(model.model.vision_tower.parameters())
        patches = [self._patches(image, weight) for image in images]
        places = [_places(*image.plan.grid) for image in images]
        most = max(map(len, patches))
        pixels = torch.stack([pad(each, (0, 0, 0, most - len(each))) for each in patches])
        positions = torch.stack([pad(each, (0, 0, 0, most - len(each)), value=-1) for each in places])
        return list(model.model.get_image_features(pixels, moved(positions, weight.device)).pooler_output)

    def _patches(self, image: EncodedImage, weight: Tensor) -> Tensor:
        """Build the patches (N, numbers in a patch) of a picture, row by row."""
        pixels_13YX = moved(image.views[0], weight.device).permute(2, 0, 1)[None]
        pixels_3YX = normalised(pixels_13YX, self.checkpoint.image_processor, weight.dtype)[0]
        rows, columns = image.plan.grid
        apart = pixels_3YX.unflatten(2, (columns, -1)).unflatten(1, (rows, -1))
        return apart.permute(1, 3, 2, 4, 0).flatten(0, 1).flatten(1)

    def embedding(self, model: HuggingFaceModel) -> Any:
        if not self._layer_width:
            return super().embedding(model)
        return TokenAndLayerEmbedding(self.language_model(model), self.placeholder_ids)

    def with_features(self, embeddings: Tensor, is_vision: Tensor, features_KH: Tensor) -> Tensor:
        width = self.checkpoint.config.text_config.hidden_size
        replaced = super().with_features(embeddings[..., :width], is_vision, features_KH)
        return torch.cat([replaced, embeddings[..., width:]], dim=-1)

    def decoder_inputs(self, embeddings: Tensor) -> dict[str, Any]:
        if not self._layer_width:
            return super().decoder_inputs(embeddings)
        width = self.checkpoint.config.text_config.hidden_size
        of_tokens = embeddings[..., :width]
        of_layers = embeddings[..., width:].unflatten(-1, (-1, self._layer_width))
        return {"inputs_embeds": of_tokens, "per_layer_inputs": of_layers}

    @property
    def _layer_width(self) -> int:
        return self.checkpoint.config.text_config.hidden_size_per_layer_input or 0


def _places(rows: int, columns: int) -> Tensor:
    """Return the column and row (N, 2) of each patch."""
    order = torch.arange(rows * columns)
    return torch.stack([order % columns, order // columns], dim=1)
