"""InternVL3 and 3.5: square tiles and a thumbnail, each with the same number of tokens, between <img> and </img>; 1-D
positions.

Shape suffixes: docs/shapes.md. D is 1.
"""

from collections.abc import Sequence
from typing import ClassVar

from PIL import Image
from torch import Tensor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
    GotOcr2ImageProcessorPil,
    get_optimal_tiled_canvas,
)

from tiercel.models.families.base import Family, HuggingFaceModel
from tiercel.models.families.image_transforms import canvas_and_thumbnail, normalised_tiles, tiles
from tiercel.types import CoordinateSpace, EncodedImage, ImagePlan, PixelLimits, Size


class InternVL(Family):
    """InternVL3 and InternVL3.5, which write boxes in thousandths of each side."""

    name = "internvl"
    serves = "InternVL3 and InternVL3.5 in transformers' own form, such as `OpenGVLab/InternVL3-1B-hf`"
    special = "a thumbnail beside several tiles, all of the same number of tokens, between `<img>` and `</img>`"
    vllm = (
        "in `make test-vllm`, in process, with pictures of one tile; tried once by server. Of several tiles vLLM makes "
        "another thumbnail ([vllm.md](vllm.md#families-that-vllm-does-not-serve))"
    )
    coordinate_space: ClassVar[CoordinateSpace] = "thousandths"
    part_prefixes: ClassVar = {"vision": ("model.vision_tower.",), "projector": ("model.multi_modal_projector.",)}
    image_marker = "<IMG_CONTEXT>"
    image_processor_class = GotOcr2ImageProcessorPil

    def plan_image(self, size: Size, limits: PixelLimits | None = None) -> ImagePlan:
        self.refuse_limits(limits)
        processor = self.checkpoint.image_processor
        (width, height), tile = size, (processor.size["width"], processor.size["height"])
        # crop_to_patches is ignored, because InternVL's processor always uses true although published checkpoints say
        # false.
        columns, rows = get_optimal_tiled_canvas(
            (height, width), tile[::-1], processor.min_patches, processor.max_patches
        )
        return ImagePlan(
            original_size=size,
            processed_size=(columns * tile[0], rows * tile[1]),
            grid=(rows, columns),
            token_count=self.checkpoint.config.image_seq_length * _tile_count(rows, columns) + 2,
        )

    def encode_image(self, image: Image.Image, limits: PixelLimits | None = None) -> EncodedImage:
        return canvas_and_thumbnail(image, self.plan_image(image.size, limits), self.checkpoint.image_processor)

    def image_token_ids(self, plan: ImagePlan) -> list[int]:
        start, end = self.tokenizer.convert_tokens_to_ids(["<img>", "</img>"])
        return [start, *[self.checkpoint.config.image_token_id] * (plan.token_count - 2), end]

    def vision_features(self, model: HuggingFaceModel, images: Sequence[EncodedImage]) -> list[Tensor]:
        tiles_of = [[*tiles(image.views[0], *image.plan.grid), *image.views[1:]] for image in images]
        every_tile = [tile for of_image in tiles_of for tile in of_image]
        weight = next(model.model.vision_tower.parameters())
        pixels_I = normalised_tiles(every_tile, self.checkpoint.image_processor, weight)
        features_IKH = model.model.get_image_features(pixels_I).pooler_output
        by_image = features_IKH.split([len(of_image) for of_image in tiles_of])
        return [of_image_IKH.flatten(0, 1) for of_image_IKH in by_image]


def _tile_count(rows: int, columns: int) -> int:
    """Count the tiles of a canvas, including the thumbnail if there are several tiles."""
    return rows * columns + (rows * columns > 1)
