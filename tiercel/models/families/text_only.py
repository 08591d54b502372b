"""Text-only causal language models of transformers, without pictures and with 1-D positions.

Shape suffixes: docs/shapes.md. D is 1.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tiercel.errors import DataError, ModelError
from tiercel.models.families.base import Family, HuggingFaceModel
from tiercel.types import EncodedImage, EncodedPrompt, ImagePlan, PixelLimits, Size


class TextOnly(Family):
    """Any causal language model without pictures. Each checkpoint is proved before it is used."""

    name = "text_only"
    serves = "any causal language model of transformers, such as `Qwen/Qwen3-4B`"
    special = "proved on each checkpoint"
    vllm = "Qwen3 in `make test-vllm`, in process"
    part_prefixes: ClassVar = {}
    sizes = "reads no pictures"
    needs_proof = True
    model_class = AutoModelForCausalLM

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        return ()

    def _refusal(self) -> DataError:
        model = f"{self.checkpoint.path} ({self.checkpoint.config.model_type})"
        return DataError(
            f"{model} is a text-only model and does not read pictures; use an image-text model, or remove the picture",
            field="images",
        )

    def plan_image(self, size: Size, limits: PixelLimits | None = None) -> ImagePlan:
        raise self._refusal()

    def encode_image(self, image: Image.Image, limits: PixelLimits | None = None) -> EncodedImage:
        raise self._refusal()

    def image_token_ids(self, plan: ImagePlan) -> list[int]:
        raise self._refusal()

    def vision_features(self, model: HuggingFaceModel, images: Sequence[EncodedImage]) -> list[Tensor]:
        if images:
            raise self._refusal()
        return []

    def language_model(self, model: HuggingFaceModel) -> nn.Module:
        decoder = model.get_decoder()
        if decoder is model:
            raise ModelError(f"{type(model).__name__} does not say which of its modules is the decoder")
        return decoder

    def plain_inputs(self, prompt: EncodedPrompt, token_ids_T: Tensor) -> dict[str, Tensor]:
        return {"input_ids": token_ids_T[None], "attention_mask": torch.ones_like(token_ids_T)[None]}
