"""The pictures of a run, as the pages show them."""

import io

import numpy as np
import pytest
from PIL import Image

from tiercel.runs.pictures import picture_file, webp, write_picture


def decoded(picture: Image.Image) -> Image.Image:
    read = Image.open(io.BytesIO(webp(picture)))
    assert read.format == "WEBP" and read.mode == "RGB"
    return read


@pytest.mark.parametrize("size", ((1, 1), (1, 7), (5, 1), (64, 48), (97, 33)))
def test_a_small_picture_is_read_as_it_was(size):
    noise = np.random.default_rng(sum(size)).integers(0, 256, (*size, 3), dtype=np.uint8)
    for pixels in (noise, np.full((*size, 3), 255, dtype=np.uint8)):
        assert np.array_equal(np.asarray(decoded(Image.fromarray(pixels))), pixels)


def test_a_large_picture_is_reduced_and_nearly_the_same():
    height, width = np.mgrid[0:600, 0:960]
    pixels = np.stack([height * 255 // 599, width * 255 // 959, np.full_like(width, 99)], axis=-1).astype(np.uint8)
    read = decoded(Image.fromarray(pixels))
    assert read.size == (448, 280)
    expected = Image.fromarray(pixels).resize((448, 280), Image.Resampling.LANCZOS)
    assert np.abs(np.asarray(read, dtype=float) - np.asarray(expected, dtype=float)).mean() < 3


def test_a_picture_of_an_older_version_is_found(tmp_path):
    file = picture_file(tmp_path, "a" * 64)
    assert file.name == "a" * 64 + ".webp"
    write_picture(file, np.zeros((2, 2, 3), dtype=np.uint8), tmp_path / "tmp")
    assert [each.name for each in tmp_path.iterdir()] == [file.name]
    (tmp_path / ("a" * 64 + ".png")).write_bytes(b"")
    assert picture_file(tmp_path, "a" * 64).suffix == ".png"
