"""Functions that families share: pictures as tensors, their hashes, their tiles, and their pixels in the model's form.

Shape suffixes: docs/shapes.md.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tiercel.devices import moved
from tiercel.types import EncodedImage, ImagePlan, Size


def picture_tensor(image: Image.Image) -> Tensor:
    """Copy an RGB image to a tensor, uint8 (Y, X, 3)."""
    return torch.from_numpy(np.array(image, dtype=np.uint8))


def picture_image(picture_YX3: Tensor) -> Image.Image:
    """Build an RGB image from a tensor, uint8 (Y, X, 3)."""
    return Image.fromarray(picture_YX3.numpy())


def resized(image: Image.Image, size: Size, resample: int) -> Image.Image:
    """Resize along x, then along y, so that every version of Pillow gives the same pixels. From version 13 on, its own
    order depends on the shape, and between the two passes values are cut to whole grey levels."""
    return image.resize((size[0], image.height), resample).resize(size, resample)


def random_picture(size: Size, seed: int) -> Image.Image:
    """Build a picture of random pixels."""
    shape, generator = (size[1], size[0], 3), torch.Generator().manual_seed(seed)
    return picture_image(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator))


def views_sha256(views: Sequence[Tensor], also: object = "") -> str:
    """Hash the sizes and pixels of the views, and `also`, which is whatever else determines their features."""
    digest = hashlib.sha256(str(also).encode())
    for view in views:
        digest.update(repr(tuple(view.shape)).encode())
        digest.update(view.numpy().tobytes())
    return digest.hexdigest()


def normalised(pixels: Tensor, image_processor: Any, dtype: torch.dtype) -> Tensor:
    """Rescale and normalise pixels, uint8 (N, 3, ...), as the image processor does. The result has the same shape.

    The processor's own arithmetic produces a table of all values that a pixel can have, so the numbers are equal on
    every device.
    """
    levels: Any = np.broadcast_to(np.arange(256, dtype=np.uint8), (3, 1, 256))
    if image_processor.do_rescale:
        levels = image_processor.rescale(levels, image_processor.rescale_factor)
    if image_processor.do_normalize:
        levels = image_processor.normalize(levels, image_processor.image_mean, image_processor.image_std)
    table = moved(torch.from_numpy(np.array(levels)).to(dtype).flatten(), pixels.device)
    first = torch.arange(0, len(table), 256, dtype=torch.int32, device=pixels.device)
    places = pixels + first.view(-1, *[1] * (pixels.ndim - 2))
    return table.index_select(0, places.flatten()).view(pixels.shape)


def normalised_tiles(tiles: Sequence[Tensor], image_processor: Any, weight: Tensor) -> Tensor:
    """Build the pixels (I, 3, Y, X) of tiles, uint8 (Y, X, 3), on the device and in the dtype of `weight`."""
    pixels_IYX3 = moved(torch.stack(list(tiles)), weight.device)
    return normalised(pixels_IYX3.permute(0, 3, 1, 2), image_processor, weight.dtype)


def canvas_and_thumbnail(image: Image.Image, plan: ImagePlan, image_processor: Any) -> EncodedImage:
    """Resize an image to the canvas of a plan whose grid is (rows, columns) of tiles. If there are several tiles, a
    second view has the image in the size of one tile."""
    tile = image_processor.size["width"], image_processor.size["height"]
    sizes = [plan.processed_size] if plan.grid == (1, 1) else [plan.processed_size, tile]
    views = tuple(picture_tensor(resized(image, size, image_processor.resample)) for size in sizes)
    return EncodedImage(sha256=views_sha256(views), plan=plan, views=views)


def tiles(canvas_YX3: Tensor, rows: int, columns: int) -> list[Tensor]:
    """Cut a picture into equal parts, row by row."""
    bands = canvas_YX3.chunk(rows, dim=0)
    return [tile.contiguous() for band in bands for tile in band.chunk(columns, dim=1)]
