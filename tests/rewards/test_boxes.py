import pytest

from tiercel.rewards.boxes import from_original, iou, to_original


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ((0, 0, 10, 10), (0, 0, 10, 10), 1.0),
        ((0, 0, 10, 10), (5, 0, 15, 10), 50 / 150),
        ((0, 0, 10, 10), (5, 5, 15, 15), 25 / 175),
        ((0, 0, 4, 4), (1, 1, 3, 3), 4 / 16),
        ((0, 0, 10, 10), (10, 0, 20, 10), 0.0),  # edges touch
        ((0, 0, 10, 10), (20, 20, 30, 30), 0.0),
        ((10, 0, 0, 10), (0, 0, 10, 10), 0.0),  # inverted in x
        ((10, 10, 0, 0), (0, 0, 10, 10), 0.0),  # inverted in both: the product of its sides is positive
        ((5, 0, 5, 10), (0, 0, 10, 10), 0.0),  # no width
        ((-10, -10, 10, 10), (0, 0, 10, 10), 100 / 400),
    ],
)
def test_iou_by_hand_and_symmetric(left, right, expected):
    assert iou(left, right) == pytest.approx(expected)
    assert iou(right, left) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("box", "space", "expected"),
    [
        ((40, 5, 400, 50), "resized_pixels", (20, 10, 200, 100)),  # x halves, y doubles
        ((100, 250, 1000, 500), "thousandths", (20, 25, 200, 50)),
        ((0.25, 0.5, 1.0, 0.75), "unit", (50, 50, 200, 75)),
    ],
)
def test_spaces_map_to_original_pixels_and_back_with_a_scale_for_each_side(box, space, expected):
    original_size, processed_size = (200, 100), (400, 50)
    assert to_original(box, space, original_size, processed_size) == pytest.approx(expected)
    assert from_original(expected, space, original_size, processed_size) == pytest.approx(box)
