"""Qwen2-VL and Qwen2.5-VL: native resolution, M-RoPE, one placeholder token for each merged patch.

Shape suffixes: docs/shapes.md. D is 3: time, height, width.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor, nn
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from tiercel.devices import moved
from tiercel.errors import DataError, ModelError
from tiercel.models.families.base import Family, HuggingFaceModel
from tiercel.models.families.image_transforms import normalised, picture_tensor, resized, views_sha256
from tiercel.models.layers.tower_attention import sorted_windows, tower_inputs
from tiercel.types import CoordinateSpace, EncodedImage, ImagePlan, PixelLimits, Size

PAIR = 2  # frames in one layer of a video's grid


class Qwen2VL(Family):
    """Qwen2-VL, which writes boxes in thousandths of each side."""

    name = "qwen2_vl"
    serves = "Qwen2-VL, such as `Qwen/Qwen2-VL-2B-Instruct`"
    special = "native resolution, a token for 28 x 28 pixels"
    vllm = "in `make test-vllm`, in process and by server"
    coordinate_space: ClassVar[CoordinateSpace] = "thousandths"
    position_dimensions = 3
    part_prefixes: ClassVar = {"vision": ("model.visual.",), "projector": ("model.visual.merger.",)}
    image_marker = "<|image_pad|>"
    video_marker = "<|video_pad|>"
    has_pixel_limits = True
    image_processor_class = Qwen2VLImageProcessorPil

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        config = self.checkpoint.config
        return config.image_token_id, config.video_token_id

    def plan_image(self, size: Size, limits: PixelLimits | None = None) -> ImagePlan:
        return self._planned(size, *self._pixels(limits))

    def _planned(self, size: Size, least: int, most: int) -> ImagePlan:
        processor = self.checkpoint.image_processor
        width, height = size
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
        """Return the smallest and the largest number of pixels: the row's if it has any, otherwise the recipe's. Raises
        DataError if the row's are outside the recipe's, because an engine that resizes again by the recipe's limits
        must not change the image, and ModelError if the recipe's leave no size."""
        size = self.checkpoint.image_processor.size
        least, most = self.min_pixels or size["shortest_edge"], self.max_pixels or size["longest_edge"]
        if least > most and (self.min_pixels or self.max_pixels):
            raise _crossed(self.checkpoint.path, least, most, is_high=self.max_pixels is None)
        if limits is None:
            return least, most
        for key, given in (("min_pixels", limits.least), ("max_pixels", limits.most)):
            if given is not None and not least <= given <= most:
                raise DataError(
                    f"is {given}, but must be between model.min_pixels {least} and model.max_pixels {most}; change "
                    f"these, or remove the row's {key}",
                    field=key,
                )
        return limits.least or least, limits.most or most

    def plan_video(self, size: Size, frame_count: int, fps: float, limits: PixelLimits) -> ImagePlan:
        """Plan a video. Two frames form one layer of the grid; a last frame without a partner is used twice."""
        try:
            picture = self._planned(size, limits.least or 1, limits.most or 1)
        except DataError as error:
            raise DataError(str(error), field="videos") from error
        grid = (-(-frame_count // PAIR), *picture.grid[1:])
        plan = replace(picture, grid=grid, frame_count=frame_count, fps=fps, token_count=grid[0] * picture.token_count)
        return replace(plan, token_count=len(self.image_token_ids(plan)))

    def encode_video(self, frames: Iterable[Image.Image], plan: ImagePlan) -> EncodedImage:
        resample = self.checkpoint.image_processor.resample
        views = tuple(picture_tensor(resized(frame, plan.processed_size, resample)) for frame in frames)
        return EncodedImage(sha256=views_sha256(views, also=("video", plan.fps)), plan=plan, views=views)

    def image_token_ids(self, plan: ImagePlan) -> list[int]:
        config = self.checkpoint.config
        if plan.fps is None:
            return [config.image_token_id] * plan.token_count
        merge_size = config.vision_config.spatial_merge_size
        return [config.video_token_id] * (math.prod(plan.grid) // merge_size**2)

    def grid_times(self, plan: ImagePlan) -> list[list[int]]:
        """Return the times of the layers, in positions, for each run of placeholders of an image or video."""
        return [list(range(plan.grid[0]))]

    def positions(self, token_ids_P: Tensor, plans: Sequence[ImagePlan]) -> Tensor:
        """Compute positions (3, P). Each text token adds one to all three dimensions. An image covers its grid, and the
        text after it begins at the image's largest position plus 1, as completions do.

        This is Qwen's own rule. For a video whose longest side is its time, transformers 5 begins after the width or
        height in training, and after the time in generation.
        """
        merge_size = self.checkpoint.config.vision_config.spatial_merge_size
        is_vision = self.is_placeholder(token_ids_P).tolist()
        pieces: list[Tensor] = []
        runs = ((plan.grid, times) for plan in plans for times in self.grid_times(plan))
        position = start = 0
        while start < len(is_vision):
            if is_vision[start]:
                (_, height, width), times = next(runs)
                height, width = height // merge_size, width // merge_size
                layers = torch.tensor(times).repeat_interleave(height * width)
                rows = torch.arange(height).repeat_interleave(width).repeat(len(times))
                columns = torch.arange(width).repeat(height * len(times))
                pieces.append(torch.stack([layers, rows, columns]) + position)
                start += len(times) * height * width
                position += max(height, width, times[-1] + 1)
            else:
                stop = start
                while stop < len(is_vision) and not is_vision[stop]:
                    stop += 1
                pieces.append(torch.arange(stop - start).expand(3, -1) + position)
                position += stop - start
                start = stop
        return torch.cat(pieces, dim=1)

    def tower_of_spans(self, model: HuggingFaceModel) -> nn.Module:
        return model.model.visual

    def vision_features(self, model: HuggingFaceModel, images: Sequence[EncodedImage]) -> list[Tensor]:
        tower = model.model.visual
        weight = next(tower.parameters())
        patches = torch.cat([self.patches(image, weight.device, weight.dtype) for image in images])
        grids = torch.tensor([image.plan.grid for image in images])
        inputs = tower_inputs(self.grid_inputs(tower, grids), weight.device)
        merged = tower.spatial_merge_size**2
        counts = [math.prod(image.plan.grid) // merged for image in images]
        return list(self.tower_features(tower(patches, grid_thw=grids, **inputs)).split(counts))

    def tower_features(self, output: Any) -> Tensor:
        """Return the features of all images from the output of the tower."""
        return output.pooler_output

    def grid_inputs(self, tower: HuggingFaceModel, grids: Tensor) -> dict[str, Tensor]:
        """Compute on the CPU what the tower's forward pass needs to know about the grids, int64 (images, 3). The tower
        itself would compute it on the device and wait for it."""
        return {
            "position_ids": get_vision_position_ids(grids, tower.spatial_merge_size),
            "cu_seqlens": get_vision_cu_seqlens(grids),
        }

    def patches(self, image: EncodedImage, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Compute the patches (T, 3 x 2 x pixels) of an image or a video for the tower. An image fills both halves of
        each patch; in a layer of a video, the first half has one frame and the second half the next frame."""
        processor = self.checkpoint.image_processor
        side, merge_size = processor.patch_size, processor.merge_size
        layers, height, width = image.plan.grid
        views = list(image.views)
        if image.plan.fps is not None:
            views += views[-1:] * (-len(views) % PAIR)
        frames = moved(torch.stack(views), device)
        pieces = frames.view(
            layers, -1, height // merge_size, merge_size, side, width // merge_size, merge_size, side, 3
        ).permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
        pixels = pieces.reshape(layers * height * width, 3, -1, side * side)
        return normalised(pixels, processor, dtype).expand(-1, -1, PAIR, -1).flatten(1)


def _crossed(path: str, least: int, most: int, *, is_high: bool) -> ModelError:
    """Build the error of a limit of the recipe beyond the checkpoint's other limit: the lower one if `is_high`."""
    if is_high:
        return ModelError(
            f"model.min_pixels: is {least}, but by its preprocessor_config.json {path} takes at most {most} pixels; "
            f"set model.max_pixels too, to {least} or more, or model.min_pixels to {most} or less"
        )
    return ModelError(
        f"model.max_pixels: is {most}, but by its preprocessor_config.json {path} takes at least {least} pixels; set "
        f"model.min_pixels too, to {most} or less, or model.max_pixels to {least} or more"
    )


class Qwen25VL(Qwen2VL):
    """Qwen2.5-VL, which writes boxes in pixels of the resized image."""

    name = "qwen2_5_vl"
    serves = "Qwen2.5-VL, such as `Qwen/Qwen2.5-VL-3B-Instruct`"
    special = "as `qwen2_vl`"
    vllm = "in `make test-vllm`, in process and by server"
    coordinate_space: ClassVar[CoordinateSpace] = "resized_pixels"

    def grid_times(self, plan: ImagePlan) -> list[list[int]]:
        """Return the layers' times, in positions. The distance between a video's layers follows their times in
        seconds."""
        if plan.fps is None:
            return super().grid_times(plan)
        apart = self.checkpoint.config.vision_config.tokens_per_second * PAIR / plan.fps
        return [(torch.arange(plan.grid[0]) * apart).long().tolist()]

    def told_fps(self, plan: ImagePlan) -> float:
        """Return the middle of the rates with these `grid_times`. At the video's own, which may be the first or the
        last of them, an engine may round to other positions."""
        (_, *times), places = self.grid_times(plan)[0], range(1, plan.grid[0])
        if not times:
            return super().told_fps(plan)
        least = max(time / place for time, place in zip(times, places, strict=True))
        most = min((time + 1) / place for time, place in zip(times, places, strict=True))
        return self.checkpoint.config.vision_config.tokens_per_second * PAIR * 2 / (least + most)

    def grid_inputs(self, tower: HuggingFaceModel, grids: Tensor) -> dict[str, Tensor]:
        index, bounds = get_vision_window_index(grids, tower.spatial_merge_size, tower.window_size, tower.patch_size)
        inputs = super().grid_inputs(tower, grids)
        index, bounds = sorted_windows(index, bounds, inputs["cu_seqlens"])
        return inputs | {"window_index": index, "cu_window_seqlens": bounds}
