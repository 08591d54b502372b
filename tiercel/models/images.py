"""Small helpers that families share: pictures as tensors, their hash, their tiles."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tiercel.types import EncodedImage, ImagePlan, Size


def picture_tensor(image: Image.Image) -> Tensor:
    """uint8 (H, W, 3) of an RGB image, in memory of its own."""
    return torch.from_numpy(np.array(image, dtype=np.uint8))


def picture_image(picture_YX3: Tensor) -> Image.Image:
    """The inverse of `picture_tensor`."""
    return Image.fromarray(picture_YX3.numpy())


def views_sha256(views: Sequence[Tensor], also: object = "") -> str:
    """Hash of sizes and bytes, and of what `also` decides about the features: equal for equal pictures."""
    digest = hashlib.sha256(str(also).encode())
    for view in views:
        digest.update(repr(tuple(view.shape)).encode())
        digest.update(view.numpy().tobytes())
    return digest.hexdigest()


def canvas_and_thumbnail(image: Image.Image, plan: ImagePlan, tile: Size, resample: Any) -> EncodedImage:
    """The whole canvas of a plan whose grid is (rows, columns) of tiles first; where they are several, the picture as
    one tile second."""
    sizes = [plan.processed_size] if plan.grid == (1, 1) else [plan.processed_size, tile]
    views = tuple(picture_tensor(image.resize(size, resample=resample)) for size in sizes)
    return EncodedImage(sha256=views_sha256(views), plan=plan, views=views)


def tiles(canvas_YX3: Tensor, rows: int, columns: int) -> list[Tensor]:
    """Equal parts of a picture, row by row."""
    bands = canvas_YX3.chunk(rows, dim=0)
    return [tile.contiguous() for band in bands for tile in band.chunk(columns, dim=1)]
