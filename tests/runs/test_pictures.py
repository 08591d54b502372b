"""The PNG files of a run, read by Pillow."""

import io

import numpy as np
import pytest
from PIL import Image

from tiercel.runs.pictures import png


@pytest.mark.parametrize("size", ((1, 1), (1, 7), (5, 1), (64, 48), (97, 33)))
def test_a_picture_is_read_as_it_was(size):
    rng = np.random.default_rng(sum(size))
    for pixels in (rng.integers(0, 256, (*size, 3), dtype=np.uint8), np.full((*size, 3), 255, dtype=np.uint8)):
        picture = Image.open(io.BytesIO(png(pixels)))
        picture.load()
        assert picture.format == "PNG" and picture.mode == "RGB" and np.array_equal(np.asarray(picture), pixels)
