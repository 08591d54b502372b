"""A picture is decoded once for all rows of a step, and for both sides of a pair."""

import pytest

from tests.training.test_loops import noise_image
from tiercel.config.data import Data
from tiercel.config.schema import Model
from tiercel.data import encoding
from tiercel.data.encoding import decoding_once, row_images
from tiercel.errors import DataError
from tiercel.models.families.loading import load_family
from tiercel.types import ImageRoots, ImageSource, Message, PixelLimits, Row


@pytest.fixture
def decoded(monkeypatch):
    """The sources that were decoded, in their order."""
    found, decode = [], encoding.decode
    monkeypatch.setattr(encoding, "decode", lambda source, *rest: found.append(source.path) or decode(source, *rest))
    return found


def row_of(tmp_path, *paths, **more):
    images = tuple(ImageSource(path=path) for path in paths)
    about = {
        "id": "r",
        "messages": (Message(role="user", content="<image>" * len(paths)),),
        "columns": {},
        "file": "r.jsonl",
        "line": 1,
    }
    return Row(**about, images=images, image_roots=ImageRoots(base=str(tmp_path)), **more)


def test_a_picture_is_decoded_once(tiny_checkpoints, tmp_path, decoded):
    family, data = load_family(Model(path=str(tiny_checkpoints["qwen2_vl"]))), Data(train="")
    for number, name in enumerate(("a.png", "b.png")):
        noise_image(64, 60, seed=number).save(tmp_path / name)
    row = row_of(tmp_path, "a.png", "b.png", "a.png")
    with decoding_once():
        first, other, again = row_images(family, data, row)
        (further,) = row_images(family, data, row_of(tmp_path, "b.png"))
        assert decoded == ["a.png", "b.png"] and first is again and other is further
        (small,) = row_images(family, data, row_of(tmp_path, "a.png", pixels=PixelLimits(most=28 * 28 * 2)))
        assert len(decoded) == 3 and small.plan != first.plan
        for _ in range(2):
            with pytest.raises(DataError):
                row_images(family, data, row_of(tmp_path, "gone.png"))
    alone = row_images(family, data, row)
    assert len(decoded) == 3 + 2 + 3 and [each.sha256 for each in alone] == [first.sha256, other.sha256, first.sha256]
