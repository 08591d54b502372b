"""Functions that families share: pictures as tensors, their hash, their tiles. Shape suffixes: docs/shapes.md."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tiercel.types import EncodedImage, ImagePlan, Size


def picture_tensor(image: Image.Image) -> Tensor:
    """Copy an RGB image to a tensor, uint8 (Y, X, 3)."""
    return torch.from_numpy(np.array(image, dtype=np.uint8))


def picture_image(picture_YX3: Tensor) -> Image.Image:
    """Make an RGB image of a tensor, uint8 (Y, X, 3)."""
    return Image.fromarray(picture_YX3.numpy())


def views_sha256(views: Sequence[Tensor], also: object = "") -> str:
    """Hash sizes and pixels of the views, and `also`, which is whatever else decides their features."""
    digest = hashlib.sha256(str(also).encode())
    for view in views:
        digest.update(repr(tuple(view.shape)).encode())
        digest.update(view.numpy().tobytes())
    return digest.hexdigest()


def canvas_and_thumbnail(image: Image.Image, plan: ImagePlan, tile: Size, resample: Any) -> EncodedImage:
    """Resize an image to the canvas of a plan whose grid is (rows, columns) of tiles. Where there are several tiles, a
    second view has the image in the size of one tile."""
    sizes = [plan.processed_size] if plan.grid == (1, 1) else [plan.processed_size, tile]
    views = tuple(picture_tensor(image.resize(size, resample=resample)) for size in sizes)
    return EncodedImage(sha256=views_sha256(views), plan=plan, views=views)


def tiles(canvas_YX3: Tensor, rows: int, columns: int) -> list[Tensor]:
    """Cut a picture into equal parts, row by row."""
    bands = canvas_YX3.chunk(rows, dim=0)
    return [tile.contiguous() for band in bands for tile in band.chunk(columns, dim=1)]
