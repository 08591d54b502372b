"""LLaVA-OneVision: an image in the size of one tile, then the image on a canvas of tiles; 1-D positions.

The features of the canvas's padding are cut off, large grids of features are reduced, and each row of features ends
with a newline. Each image of a prompt has its own canvas, as in vLLM and in transformers' processor for a flat list of
images; several images in a list of their conversation get no canvas from that processor. Shape suffixes:
docs/shapes.md. D is 1.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

from tiercel.errors import DataError
from tiercel.models.families.base import Family, HuggingFaceModel
from tiercel.models.families.image_transforms import normalised_tiles, picture_tensor, resized, tiles, views_sha256
from tiercel.types import CoordinateSpace, EncodedImage, ImagePlan, PixelLimits, Size

SHRINKS_ABOVE = 1.1  # the grid is reduced if its sides are more than this factor too long


class LlavaOnevision(Family):
    """LLaVA-OneVision, which writes boxes in fractions of each side."""

    name = "llava_onevision"
    serves = "LLaVA-OneVision, such as `llava-hf/llava-onevision-qwen2-0.5b-ov-hf`"
    special = "the picture squashed to one tile, then on a canvas of tiles without its padding; newlines"
    vllm = "refused by name: its class in vLLM has no adapters, and transformers' own gets another view of a picture"
    coordinate_space: ClassVar[CoordinateSpace] = "unit"
    part_prefixes: ClassVar = {
        "vision": ("model.vision_tower.",),
        "projector": ("model.multi_modal_projector.", "model.image_newline"),
    }
    image_marker = "<image>"
    image_processor_class = LlavaOnevisionImageProcessorPil

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        config = self.checkpoint.config
        return config.image_token_id, config.video_token_id

    def plan_image(self, size: Size, limits: PixelLimits | None = None) -> ImagePlan:
        self.refuse_limits(limits)
        config, (width, height) = self.checkpoint.config, size
        tile = config.vision_config.image_size
        canvas_height, canvas_width = select_best_resolution((height, width), config.image_grid_pinpoints)
        scale_x, scale_y = canvas_width / width, canvas_height / height
        if scale_x < scale_y:
            resized = canvas_width, min(math.ceil(height * scale_x), canvas_height)
        else:
            resized = min(math.ceil(width * scale_y), canvas_width), canvas_height
        grid = canvas_height // tile, canvas_width // tile
        rows, columns = self._feature_grid(size, grid)
        side = tile // config.vision_config.patch_size
        return ImagePlan(
            original_size=size, processed_size=resized, grid=grid, token_count=side * side + rows * (columns + 1)
        )

    def _feature_grid(self, size: Size, grid: tuple[int, int]) -> tuple[int, int]:
        """Count the rows and columns of the canvas's features without its padding, reduced to the allowed number."""
        config, (width, height) = self.checkpoint.config, size
        side = config.vision_config.image_size // config.vision_config.patch_size
        rows, columns = grid[0] * side, grid[1] * side
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        if not rows or not columns:
            raise DataError(
                f"image of {width} x {height} pixels: it is too narrow, so none of its features are left on its canvas",
                field="images",
            )
        most = int(config.vision_aspect_ratio.removeprefix("anyres_max_"))
        ratio = math.sqrt(rows * columns / (most * side**2))
        return (int(rows // ratio), int(columns // ratio)) if ratio > SHRINKS_ABOVE else (rows, columns)

    def encode_image(self, image: Image.Image, limits: PixelLimits | None = None) -> EncodedImage:
        """Resize the image to its size on the canvas, without padding, and to the size of one tile."""
        resample = self.checkpoint.image_processor.resample
        plan, tile = self.plan_image(image.size, limits), self.checkpoint.config.vision_config.image_size
        views = tuple(picture_tensor(resized(image, size, resample)) for size in (plan.processed_size, (tile, tile)))
        return EncodedImage(sha256=views_sha256(views, also=plan.original_size), plan=plan, views=views)

    def image_token_ids(self, plan: ImagePlan) -> list[int]:
        return [self.checkpoint.config.image_token_id] * plan.token_count

    def _tiles(self, image: EncodedImage) -> list[Tensor]:
        """Return the view of one tile, then the tiles of the canvas, which has the picture at its centre."""
        picture, squashed = image.views
        tile = self.checkpoint.config.vision_config.image_size
        (rows, columns), (height, width) = image.plan.grid, picture.shape[:2]
        above, left = (rows * tile - height) // 2, (columns * tile - width) // 2
        below, right = rows * tile - height - above, columns * tile - width - left
        return [squashed, *tiles(pad(picture, (0, 0, left, right, above, below)), rows, columns)]

    def vision_features(self, model: HuggingFaceModel, images: Sequence[EncodedImage]) -> list[Tensor]:
        every_tile = [tile for image in images for tile in self._tiles(image)]
        pixels_I = normalised_tiles(every_tile, self.checkpoint.image_processor, model.model.image_newline)
        sizes = torch.tensor([image.plan.original_size[::-1] for image in images])
        return list(model.model.get_image_features(pixels_I, image_sizes=sizes).pooler_output)
