"""Ovis2: square tiles, a visual vocabulary, five indicator tokens with their own embeddings, and 1-D positions.

Shape suffixes: docs/shapes.md. D is 1; M counts those of an image's K vision tokens that are not indicators.
"""

import itertools
from collections.abc import Sequence
from typing import ClassVar

import torch
from PIL import Image
from torch import Tensor
from transformers.models.ovis2.image_processing_pil_ovis2 import (
    Ovis2ImageProcessorPil,
    get_min_tile_covering_grid,
    get_optimal_tiled_canvas,
)

from tiercel.devices import moved
from tiercel.models.families.base import Family, HuggingFaceModel
from tiercel.models.families.image_transforms import canvas_and_thumbnail, normalised_tiles, tiles
from tiercel.types import CoordinateSpace, EncodedImage, ImagePlan, PixelLimits, Size

START, GRID, COLUMN, ROW, END = range(5)  # order of config.visual_indicator_token_ids


class Ovis2(Family):
    """Ovis2, which has no fixed form for boxes. tiercel uses fractions of each side, as Ovis2.5 does."""

    name = "ovis2"
    serves = "Ovis2 in transformers' own form, such as `thisisiron/Ovis2-2B-hf`"
    special = "a visual vocabulary; tokens around and between tiles whose embeddings the vision part gives"
    vllm = "refused by name: transformers' form of the checkpoint does not start in vLLM"
    coordinate_space: ClassVar[CoordinateSpace] = "unit"
    part_prefixes: ClassVar = {
        "vision": ("model.vision_tower.",),
        "projector": ("model.vision_tower.head_", "model.visual_embeddings_table."),
    }
    image_marker = "<image>"
    marker_is_placeholder: ClassVar = False
    image_processor_class = Ovis2ImageProcessorPil

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        config = self.checkpoint.config
        return config.image_token_id, *config.visual_indicator_token_ids

    @property
    def tokens_per_tile(self) -> int:
        vision = self.checkpoint.config.vision_config
        side = -(-(vision.image_size // vision.patch_size) // vision.hidden_stride)
        return side * side

    def plan_image(self, size: Size, limits: PixelLimits | None = None) -> ImagePlan:
        self.refuse_limits(limits)
        processor = self.checkpoint.image_processor
        width, height = size
        tile_height, tile_width = processor.size["height"], processor.size["width"]
        columns, rows = 1, 1
        if processor.crop_to_patches and processor.max_patches > 1:
            if processor.use_covering_area_grid:
                columns, rows = get_min_tile_covering_grid(
                    (height, width), target_patch_size=tile_height, max_image_tiles=processor.max_patches
                )
            else:
                columns, rows = get_optimal_tiled_canvas(
                    (height, width), (tile_height, tile_width), processor.min_patches, processor.max_patches
                )
        grid = (rows, columns)
        return ImagePlan(
            original_size=size,
            processed_size=(columns * tile_width, rows * tile_height),
            grid=grid,
            token_count=len(self._layout(grid)),
        )

    def encode_image(self, image: Image.Image, limits: PixelLimits | None = None) -> EncodedImage:
        return canvas_and_thumbnail(image, self.plan_image(image.size, limits), self.checkpoint.image_processor)

    def _layout(self, grid: tuple[int, ...]) -> list[int | None]:
        """Return the tokens of an image: None for a token of a tile, otherwise the number of an indicator."""
        rows, columns = grid
        tile: list[int | None] = [None] * self.tokens_per_tile
        layout: list[int | None] = [START, *tile, GRID]
        if rows * columns > 1:
            for row in range(rows):
                for column in range(columns):
                    layout += tile
                    if column < columns - 1:
                        layout.append(COLUMN)
                if row < rows - 1:
                    layout.append(ROW)
        return [*layout, END]

    def image_token_ids(self, plan: ImagePlan) -> list[int]:
        config = self.checkpoint.config
        return [
            config.image_token_id if indicator is None else config.visual_indicator_token_ids[indicator]
            for indicator in self._layout(plan.grid)
        ]

    def _tiles(self, image: EncodedImage) -> list[Tensor]:
        """Return the tiles in the model's order: the thumbnail, then the canvas row by row."""
        canvas, *thumbnail = image.views
        return [*thumbnail, *tiles(canvas, *image.plan.grid)]

    def vision_features(self, model: HuggingFaceModel, images: Sequence[EncodedImage]) -> list[Tensor]:
        tiles_of = [self._tiles(image) for image in images]
        every_tile = [tile for of_image in tiles_of for tile in of_image]
        weight = next(model.model.vision_tower.parameters())
        output = model.model.get_image_features(normalised_tiles(every_tile, self.checkpoint.image_processor, weight))
        by_image = output.pooler_output.split([len(of_image) for of_image in tiles_of])
        return [
            self._with_indicators(image, tile_features_IKH.flatten(0, 1), output.visual_indicator_features)
            for image, tile_features_IKH in zip(images, by_image, strict=True)
        ]

    def _with_indicators(self, image: EncodedImage, tile_features_MH: Tensor, indicators_5H: Tensor) -> Tensor:
        """Arrange tile features and indicator embeddings in the order of the image's tokens."""
        of_tiles = itertools.count(len(indicators_5H))
        places = [next(of_tiles) if indicator is None else indicator for indicator in self._layout(image.plan.grid)]
        rows = torch.cat([indicators_5H.to(tile_features_MH.dtype), tile_features_MH])
        return rows.index_select(0, moved(torch.tensor(places), rows.device))
