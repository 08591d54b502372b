"""Qwen2-VL and Qwen2.5-VL: native resolution, M-RoPE, one placeholder token per merged patch.

Shape suffixes: P prompt tokens, D = 3 position dimensions (time, height, width), K vision tokens of an image,
H hidden size.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor, nn
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

from tiercel.errors import DataError
from tiercel.models.family import Family, HuggingFaceModel
from tiercel.models.images import picture_image, picture_tensor, views_sha256
from tiercel.types import CoordinateSpace, EncodedImage, ImagePlan, PixelLimits, Size


class Qwen2VL(Family):
    """Qwen2-VL writes boxes in thousandths of each side."""

    name = "qwen2_vl"
    serves = "Qwen2-VL, such as `Qwen/Qwen2-VL-2B-Instruct`"
    special = "native resolution, a token for 28 x 28 pixels"
    coordinate_space: ClassVar[CoordinateSpace] = "thousandths"
    position_dimensions = 3
    part_prefixes: ClassVar = {
        "vision": ("model.visual.",),
        "projector": ("model.visual.merger.",),
        "language": ("model.language_model.", "lm_head."),
    }
    image_marker = "<|image_pad|>"
    has_pixel_limits = True
    image_processor_class = Qwen2VLImageProcessorPil

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        config = self.checkpoint.config
        return config.image_token_id, config.video_token_id

    def plan_image(self, size: Size, limits: PixelLimits | None = None) -> ImagePlan:
        processor = self.checkpoint.image_processor
        width, height = size
        least, most = self._pixels(limits)
        try:
            resized_height, resized_width = smart_resize(
                height,
                width,
                factor=processor.patch_size * processor.merge_size,
                min_pixels=least,
                max_pixels=most,
            )
        except ValueError as error:
            raise DataError(f"image of {width} x {height} pixels: {error}", field="images") from error
        grid = (1, resized_height // processor.patch_size, resized_width // processor.patch_size)
        return ImagePlan(
            original_size=size,
            processed_size=(resized_width, resized_height),
            grid=grid,
            token_count=grid[1] * grid[2] // processor.merge_size**2,
        )

    def _pixels(self, limits: PixelLimits | None) -> tuple[int, int]:
        """The row's limits where it has any. An engine that resizes again by the recipe's must find nothing to do."""
        size = self.checkpoint.image_processor.size
        least, most = self.min_pixels or size["shortest_edge"], self.max_pixels or size["longest_edge"]
        if limits is None:
            return least, most
        for key, given in (("min_pixels", limits.least), ("max_pixels", limits.most)):
            if given is not None and not least <= given <= most:
                raise DataError(
                    f"is {given}, outside of model.min_pixels {least} to model.max_pixels {most}; widen those, or "
                    "remove the row's",
                    field=key,
                )
        return limits.least or least, limits.most or most

    def encode_image(self, image: Image.Image, limits: PixelLimits | None = None) -> EncodedImage:
        plan = self.plan_image(image.size, limits)
        if image.size != plan.processed_size:
            image = image.resize(plan.processed_size, resample=self.checkpoint.image_processor.resample)
        views = (picture_tensor(image),)
        return EncodedImage(sha256=views_sha256(views), plan=plan, views=views)

    def image_token_ids(self, plan: ImagePlan) -> list[int]:
        return [self.checkpoint.config.image_token_id] * plan.token_count

    def positions(self, token_ids_P: Tensor, plans: Sequence[ImagePlan]) -> Tensor:
        """Text advances all three dimensions by one; an image spans its grid and advances by its longer side."""
        merge_size = self.checkpoint.config.vision_config.spatial_merge_size
        is_image = (token_ids_P == self.checkpoint.config.image_token_id).tolist()
        pieces: list[Tensor] = []
        images = iter(plans)
        position = start = 0
        while start < len(is_image):
            if is_image[start]:
                _, height, width = next(images).grid
                height, width = height // merge_size, width // merge_size
                rows = torch.arange(height).repeat_interleave(width)
                columns = torch.arange(width).repeat(height)
                pieces.append(torch.stack([torch.zeros_like(rows), rows, columns]) + position)
                start += height * width
                position += max(height, width)
            else:
                stop = start
                while stop < len(is_image) and not is_image[stop]:
                    stop += 1
                pieces.append(torch.arange(stop - start).expand(3, -1) + position)
                position += stop - start
                start = stop
        return torch.cat(pieces, dim=1)

    def vision_features(self, model: HuggingFaceModel, images: Sequence[EncodedImage]) -> list[Tensor]:
        return list(self._vision_output(model, images).pooler_output)

    def _vision_output(self, model: HuggingFaceModel, images: Sequence[EncodedImage]) -> Any:
        """What transformers' tower answers: among the rest `pooler_output`, by image."""
        pictures = [picture_image(image.views[0]) for image in images]
        pixels = self.checkpoint.image_processor(images=pictures, do_resize=False, return_tensors="pt")
        weight = next(model.model.visual.parameters())
        return model.model.get_image_features(
            pixels["pixel_values"].to(weight.device, weight.dtype), pixels["image_grid_thw"].to(weight.device)
        )

    def language_model(self, model: HuggingFaceModel) -> nn.Module:
        return model.model.language_model


class Qwen25VL(Qwen2VL):
    """Qwen2.5-VL writes boxes in pixels of the resized image."""

    name = "qwen2_5_vl"
    serves = "Qwen2.5-VL, such as `Qwen/Qwen2.5-VL-3B-Instruct`"
    special = "as `qwen2_vl`"
    coordinate_space: ClassVar[CoordinateSpace] = "resized_pixels"
