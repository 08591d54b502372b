"""Gemma 3: one square picture of a fixed number of tokens, which see each other in both directions; 1-D positions; most
layers have a sliding window.

Shape suffixes: docs/shapes.md. D is 1.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from tiercel.errors import ModelError
from tiercel.models.families.base import Checkpoint, Family, HuggingFaceModel
from tiercel.models.families.image_transforms import normalised_tiles
from tiercel.models.layers.attention_span import Span, runs
from tiercel.types import EncodedImage, ImagePlan, PixelLimits, Size


class Gemma3(Family):
    """Gemma 3 with pictures."""

    name = "gemma3"
    serves = "Gemma 3 with pictures, such as `google/gemma-3-4b-it`"
    special = "a picture squashed to a square; its tokens see each other; sliding windows in five of six layers"
    vllm = "tried once in process, on a CPU: prompts agree, logprobs differ by up to 0.0013, which the gate refuses"
    part_prefixes: ClassVar = {"vision": ("model.vision_tower.",), "projector": ("model.multi_modal_projector.",)}
    image_marker = "<start_of_image>"
    marker_is_placeholder: ClassVar = False
    around_image = ("\n\n", "\n\n")
    sizes = "squashes every image to a square"
    image_processor_class = Gemma3ImageProcessorPil

    def __init__(self, checkpoint: Checkpoint, min_pixels: int | None, max_pixels: int | None):
        super().__init__(checkpoint, min_pixels, max_pixels)
        if getattr(checkpoint.image_processor, "do_pan_and_scan", False):
            raise ModelError(
                "model.path: the image processor adds crops of a picture (do_pan_and_scan: true), which tiercel does "
                "not support; set it to false in preprocessor_config.json"
            )

    def plan_image(self, size: Size, limits: PixelLimits | None = None) -> ImagePlan:
        self.refuse_limits(limits)
        side = self.checkpoint.image_processor.size
        return ImagePlan(
            original_size=size,
            processed_size=(side["width"], side["height"]),
            grid=(1, 1),
            token_count=self.checkpoint.config.mm_tokens_per_image + 2,
        )

    def image_token_ids(self, plan: ImagePlan) -> list[int]:
        config = self.checkpoint.config
        placeholders = [config.image_token_id] * config.mm_tokens_per_image
        return [config.boi_token_index, *placeholders, config.eoi_token_index]

    def unexpanded_token_ids(self, token_ids_P: Tensor, plans: Sequence[ImagePlan]) -> list[int]:
        """Return the prompt's ids with `<start_of_image>` for each image. vLLM adds the line breaks around it, so they
        are removed from the tokens before and after."""
        ids = super().unexpanded_token_ids(token_ids_P, plans)
        before, after = (text.count("\n") for text in self.around_image)
        for place in reversed([place for place, each in enumerate(ids) if each == self.placeholder_ids[0]]):
            left, right = ids[place - 1 : place], ids[place + 1 : place + 2]
            around = [*self._fewer_breaks(left, before), self.checkpoint.config.boi_token_index]
            ids[max(0, place - 1) : place + 2] = [*around, *self._fewer_breaks(right, after)]
        return ids

    def _fewer_breaks(self, ids: list[int], count: int) -> list[int]:
        """Remove `count` line breaks from a token that consists only of line breaks."""
        text = self.tokenizer.decode(ids)
        return self.tokenizer.encode("\n" * (len(text) - count), add_special_tokens=False)

    def picture_spans(self, token_ids_P: Tensor) -> tuple[Span, ...]:
        return runs(self.is_placeholder(token_ids_P))

    def vision_features(self, model: HuggingFaceModel, images: Sequence[EncodedImage]) -> list[Tensor]:
        weight = next(model.model.vision_tower.parameters())
        pixels_I = normalised_tiles([image.views[0] for image in images], self.checkpoint.image_processor, weight)
        return list(model.model.get_image_features(pixels_I).pooler_output)
