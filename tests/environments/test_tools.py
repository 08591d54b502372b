"""The built-in tools against arithmetic by hand."""

import numpy as np
import pytest
from PIL import Image
from transformers.utils import get_json_schema

from tiercel.environments.tools import BUILT_IN, PictureTools, SeenPicture, ToolProblem, use
from tiercel.types import ImagePlan


def gradient(width, height):
    """A picture whose red is the column and whose green is the row."""
    y, x = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([x, y, x * 0], axis=-1).astype(np.uint8))


def tools(space="resized_pixels", processed=(100, 50), original=(200, 100), count=1):
    plan = ImagePlan(original_size=original, processed_size=processed, grid=(1, 1, 1), token_count=1)
    pictures = [SeenPicture(original=lambda: gradient(*original), plan=plan)] * count
    return PictureTools(pictures, space)


@pytest.mark.parametrize(
    ("space", "box"),
    [("resized_pixels", [10, 5, 30, 25]), ("thousandths", [100, 100, 300, 500]), ("unit", [0.1, 0.1, 0.3, 0.5])],
)
def test_a_crop_is_cut_from_the_original(space, box):
    picture = use("crop", tools(space), {"box": box})  # the original is twice as large as what the model saw
    assert picture.size == (40, 40)
    assert picture.getpixel((0, 0)) == (20, 10, 0) and picture.getpixel((39, 39)) == (59, 49, 0)


def test_pixels_that_a_box_touches_belong_to_it():
    picture = use("crop", tools(), {"box": [10.1, 5.2, 10.2, 5.3]})  # 20.2 to 20.4, 10.4 to 10.6
    assert picture.size == (1, 1) and picture.getpixel((0, 0)) == (20, 10, 0)
    assert use("crop", tools("thousandths"), {"box": [0, 0, 1000, 1000]}).size == (200, 100)
    assert use("crop", tools("thousandths", original=(199, 101)), {"box": [0, 0, 1000, 1000]}).size == (199, 101)


def test_zoom_enlarges_to_the_size_in_which_the_picture_was_shown():
    picture = use("zoom", tools(), {"box": [10, 5, 20, 15], "label": "the seven"})  # 20 x 20 pixels of the original
    assert picture.size == (50, 50)  # shown as 100 x 50
    assert picture.getpixel((25, 25))[0] == pytest.approx(30, abs=1)
    assert use("zoom", tools(), {"box": [0, 0, 100, 50]}).size == (200, 100)  # never reduced
    assert use("zoom", tools(), {"box": [0, 0, 100, 0.5]}).size == (200, 1)
    thin = use("zoom", tools(processed=(400, 200)), {"box": [0, 0, 400, 2]})  # 200 x 1 pixels
    assert thin.size == (400, 2)


def test_mark_draws_a_circle_around_the_point():
    picture = use("mark", tools(), {"point": [50, 25]})  # at (100, 50), radius 0.03 * 200 = 6, 2 pixels thick
    red = np.argwhere(np.all(np.asarray(picture) == (255, 0, 0), axis=-1))
    assert red.min(axis=0).tolist() == [44, 94] and red.max(axis=0).tolist() == [56, 106]
    assert picture.getpixel((100, 50)) == (100, 50, 0) and picture.size == (200, 100)


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("crop", {"box": [0, 0, 101, 50]}, r"not inside image 1, which ends at \[100.0, 50.0\]"),
        ("crop", {"box": [-1, 0, 10, 10]}, "not inside image 1"),
        ("zoom", {"box": [10, 10, 10, 20]}, "has no area; x1 must be less than x2"),
        ("crop", {"box": [20, 20, 10, 30]}, "has no area"),
        ("crop", {"box": [0, 0, 10, 10], "image": 2}, "there is no image 2; there are 1"),
        ("crop", {"box": [0, 0, 10, 10], "image": 0}, "there is no image 0"),
        ("crop", {"box": [0, 0, 10]}, "box: List should have at least 4 items"),
        ("crop", {"box": [0, 0, float("nan"), 10]}, r"box\.2: Input should be a finite number"),
        ("crop", {"box": "left"}, "box: Input should be a valid list"),
        ("crop", {}, "box: Missing required argument"),
        ("crop", {"box": [0, 0, 10, 10], "self": 1}, "self"),
        ("zoom", {"box": [0, 0, 10, 10], "where": 1}, "where: Unexpected keyword argument"),
        ("mark", {"point": [101, 10]}, "not inside image 1"),
        ("mark", {"point": [1, 1, 1, 1]}, "point: List should have at most 2 items"),
    ],
)
def test_what_has_no_answer_says_why(name, arguments, reason):
    with pytest.raises(ToolProblem, match=reason):
        use(name, tools(), arguments)


def test_numbers_count_all_pictures():
    assert use("crop", tools(count=3), {"box": [0, 0, 10, 10], "image": 3}).size == (20, 20)


def test_schemas_come_from_hints_and_docstrings():
    schemas = [get_json_schema(getattr(PictureTools, name))["function"] for name in BUILT_IN]
    assert [(each["name"], each["parameters"]["required"]) for each in schemas] == [
        ("crop", ["box"]),
        ("mark", ["point"]),
        ("zoom", ["box"]),
    ]
    box = schemas[0]["parameters"]["properties"]["box"]
    assert (box["type"], box["items"]) == ("array", {"type": "number"}) and "[x1, y1, x2, y2]" in box["description"]
