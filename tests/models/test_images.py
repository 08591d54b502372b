"""Resizing gives the same pixels under every version of Pillow that tiercel accepts."""

import hashlib

import numpy as np
import pytest
from PIL import Image

from tests.tiny_models import noise_image
from tiercel.models.families.image_transforms import resized

BICUBIC = Image.Resampling.BICUBIC
# Hashes that Pillow 12.3 and 13.0 both give. In its own order, 13.0 would give others for the first three: a quarter of
# the values of a portrait differ when it becomes a square tile, and a fifth of a tall screenshot's.
HASHES = {
    ((60, 80), (48, 48)): "057e7175ba6872d7",
    ((108, 240), (56, 112)): "1530e027cc036871",
    ((30, 500), (56, 84)): "3e85d11d9383845c",
    ((80, 60), (56, 42)): "42a1c895215de179",
    ((64, 64), (128, 96)): "699635d9ffceb703",
}


@pytest.mark.parametrize(("before", "after"), HASHES)
def test_pixels_do_not_depend_on_the_version_of_pillow(before, after):
    found = np.asarray(resized(noise_image(*before, seed=1), after, BICUBIC))
    assert found.shape == (after[1], after[0], 3)
    assert hashlib.sha256(found.tobytes()).hexdigest()[:16] == HASHES[before, after]


@pytest.mark.parametrize("before", [before for before, _ in HASHES])
def test_a_picture_of_its_size_stays_as_it_is(before):
    """Why an engine that gets a resized picture sees the trainer's pixels, whatever its Pillow."""
    picture = noise_image(*before, seed=2)
    assert np.array_equal(np.asarray(resized(picture, before, BICUBIC)), np.asarray(picture))
    assert np.array_equal(np.asarray(picture.resize(before, BICUBIC)), np.asarray(picture))
