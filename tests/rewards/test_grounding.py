"""Rewards for boxes and points against numbers worked by hand."""

import itertools
import random
import time
from dataclasses import replace

import pytest

from tests.rewards.samples import reward, sample
from tiercel.errors import DataError
from tiercel.reward_types import SampleImage
from tiercel.rewards.boxes import ciou, giou, iou
from tiercel.rewards.grounding import average_precision, matched_pairs

PIXELS = {"original_size": (100, 100), "processed_size": (100, 100)}


def value(name: str, completion: str, truth, size=PIXELS, **options) -> float | None:
    return reward(name=name, **options).score(sample(completion, truth, **size))


def test_giou_by_hand():
    # areas 4 and 4, overlap 1, union 7, enclosing 9: 1/7 - 2/9
    assert giou((0, 0, 2, 2), (1, 1, 3, 3)) == pytest.approx(1 / 7 - 2 / 9)
    # apart: union 2, enclosing 10 x 1: 0 - 8/10
    assert giou((0, 0, 1, 1), (9, 0, 10, 1)) == pytest.approx(-0.8)
    assert giou((0, 0, 2, 2), (0, 0, 2, 2)) == 1.0
    assert giou((2, 2, 0, 0), (0, 0, 2, 2)) == -1.0


def test_ciou_by_hand():
    # equal shapes, centres 1 apart in both directions, diagonal of the enclosing 3 x 3: 18
    assert ciou((0, 0, 2, 2), (1, 1, 3, 3)) == pytest.approx(1 / 7 - 2 / 18)
    # same centre, 4 x 2 and 2 x 4: overlap 4 of 12; angles atan 2 and atan 1/2
    import math

    v = 4 / math.pi**2 * (math.atan(2) - math.atan(0.5)) ** 2
    assert ciou((0, 1, 4, 3), (1, 0, 3, 4)) == pytest.approx(1 / 3 - v * v / (1 - 1 / 3 + v))
    assert ciou((0, 0, 2, 2), (0, 0, 2, 2)) == 1.0


@pytest.mark.parametrize("seed", range(3))
def test_the_bounds_of_all_overlaps(seed):
    draw = random.Random(seed)
    for _ in range(300):
        boxes = []
        for _ in range(2):
            x, y = draw.uniform(0, 50), draw.uniform(0, 50)
            boxes.append((x, y, x + draw.uniform(0.1, 40), y + draw.uniform(0.1, 40)))
        assert -1 <= giou(*boxes) <= iou(*boxes) + 1e-12 <= 1 + 2e-12
        assert -2 <= ciou(*boxes) <= iou(*boxes) + 1e-12
        assert giou(*boxes) == pytest.approx(giou(*reversed(boxes)))


def test_overlaps_as_rewards():
    truth = [0, 0, 2, 2]
    assert value("iou", "[1, 1, 3, 3]", truth) == pytest.approx(1 / 7)
    assert value("giou", "[1, 1, 3, 3]", truth) == pytest.approx((1 / 7 - 2 / 9 + 1) / 2)
    assert value("ciou", "[1, 1, 3, 3]", truth) == pytest.approx((1 / 7 - 2 / 18 + 1) / 2)
    for name in ("iou", "giou", "ciou"):
        assert value(name, "nowhere", truth) == 0.0
        assert value(name, "[0, 0, 2, 2]", truth) == 1.0
        assert value(name, "[0, 0, 2, 2]", None) is None
        assert value(name, "[1, 1, 3, 3]", truth, threshold=0.9) == 0.0
        assert value(name, "[0, 0, 2, 2]", truth, threshold=0.9) == 1.0


@pytest.mark.parametrize(
    ("completion", "precision", "recall", "f1"),
    [
        ("[0, 0, 10, 10] [20, 20, 30, 30]", 1.0, 1.0, 1.0),
        ("[20, 20, 30, 30] and [0, 0, 10, 10]", 1.0, 1.0, 1.0),
        ("[0, 0, 10, 10]", 1.0, 0.5, 2 / 3),
        ("[0, 0, 10, 10] [0, 0, 10, 10]", 0.5, 0.5, 0.5),  # one to one: a box counts once
        ("[0, 0, 10, 10] [50, 50, 60, 60] [70, 70, 80, 80] [20, 20, 30, 31]", 0.5, 1.0, 2 / 3),
        ("none", 0.0, 0.0, 0.0),
    ],
)
def test_several_boxes_by_hand(completion, precision, recall, f1):
    truth = [[0, 0, 10, 10], [20, 20, 30, 30]]
    assert value("box_precision", completion, truth) == pytest.approx(precision)
    assert value("box_recall", completion, truth) == pytest.approx(recall)
    assert value("box_f1", completion, truth) == pytest.approx(f1)


def test_nothing_to_find_and_nothing_found_is_right():
    assert value("box_f1", "There is none.", []) == 1.0
    assert value("box_f1", "[0, 0, 1, 1]", []) == 0.0
    assert value("box_map", "There is none.", []) == 1.0


def test_the_pairs_are_as_many_as_possible():
    # the first given box overlaps both wanted ones, the first slightly more; the second overlaps only the first
    given = [(0, 0, 10, 10), (0, 0, 10, 9)]
    wanted = [(0, 0, 10, 9.5), (0, 3.2, 10, 12)]
    assert iou(given[0], wanted[0]) > iou(given[0], wanted[1]) > 0.5 > iou(given[1], wanted[1])
    assert sorted(matched_pairs(given, wanted, 0.5)) == [(0, 1), (1, 0)]


@pytest.mark.parametrize("seed", range(5))
def test_the_pairs_equal_those_of_all_assignments(seed):
    draw = random.Random(seed)

    def boxes(count: int) -> list:
        corners = [(draw.uniform(0, 12), draw.uniform(0, 12)) for _ in range(count)]
        return [(x, y, x + draw.uniform(4, 10), y + draw.uniform(4, 10)) for x, y in corners]

    for _ in range(20):
        given, wanted = boxes(draw.randint(1, 4)), boxes(draw.randint(1, 4))
        found = matched_pairs(given, wanted, 0.3)
        small, large = sorted((range(len(given)), range(len(wanted))), key=len)
        best = 0
        for chosen in itertools.permutations(large, len(small)):
            pairs = zip(small, chosen, strict=True) if small == range(len(given)) else zip(chosen, small, strict=True)
            best = max(best, sum(iou(given[i], wanted[j]) >= 0.3 for i, j in pairs))
        assert len(found) == best
        assert all(iou(given[i], wanted[j]) >= 0.3 for i, j in found)


def test_average_precision_by_hand():
    wanted = [(0, 0, 10, 10), (20, 20, 30, 30)]
    right, wrong = wanted[0], (50, 50, 60, 60)
    # right, wrong, right: precisions 1, 1/2, 2/3; the right ones' best from there on are 1 and 2/3
    assert average_precision([right, wrong, wanted[1]], wanted, 0.5) == pytest.approx((1 + 2 / 3) / 2)
    # wrong first: 1/2 at the only right one
    assert average_precision([wrong, right], wanted, 0.5) == pytest.approx(0.25)


def test_map_is_the_mean_over_overlaps():
    # the box overlaps by 0.8: right at 0.5, 0.55 .. 0.8, which are 7 of 10
    assert value("box_map", "[0, 0, 10, 8]", [[0, 0, 10, 10]]) == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("(15, 25)", 1.0),
        ("[15, 25]", 1.0),
        ('{"point_2d": [15, 25]}', 1.0),
        ("click(x=15, y=25)", 1.0),
        ("<answer>(10, 20)</answer>", 1.0),  # on the corner
        ("(9.9, 25)", 0.0),
        ("(90, 90)", 1.0),  # in the other box
        ("(10,20),(30,40)", 0.0),  # a box
        ("no idea", 0.0),
    ],
)
def test_a_click_counts_in_any_of_the_boxes(completion, expected):
    assert value("point_in_box", completion, [[10, 20, 30, 40], [80, 80, 95, 95]]) == expected


def test_points_and_boxes_are_mapped_from_the_models_space():
    size = {"original_size": (200, 100), "processed_size": (400, 50)}
    assert value("point_in_box", "(300, 40)", [149, 79, 151, 81], size) == 1.0  # (150, 80)
    assert value("box_f1", "[0, 0, 400, 50]", [[0, 0, 200, 100]], size) == 1.0
    assert value("vlm_r1_rec", "<answer>[0, 0, 400, 50]</answer>", [0, 0, 200, 100], size) == pytest.approx(1.0)


def test_vlm_r1s_reward_differs_from_iou_where_it_says():
    truth = [0, 0, 10, 10]
    # overlap of [5, 5, 15, 15]: far edge 9, so 5 .. 9 are 5 pixels a side: 25 / (100 + 100 - 25), as the plain one
    assert value("vlm_r1_rec", "<answer>[5, 5, 15, 15]</answer>", truth) == pytest.approx(25 / 175)
    # one pixel of overlap: 9 < 9 is false, so 0 although the plain overlap is 1 / 199
    assert value("vlm_r1_rec", "<answer>[9, 9, 19, 19]</answer>", truth) == 0.0
    assert value("iou", "<answer>[9, 9, 19, 19]</answer>", truth) == pytest.approx(1 / 199)
    two = "<answer>[5, 5, 15, 15]</answer> <answer>[0, 0, 10, 10]</answer>"
    assert value("vlm_r1_rec", two, truth) == pytest.approx(25 / 175) and value("iou", two, truth) == 1.0
    assert value("vlm_r1_rec", "<answer>[0.0, 0, 10, 10]</answer>", truth) == 0.0
    assert value("vlm_r1_rec", "[0, 0, 10, 10]", truth) == 0.0  # no answer, no box


@pytest.mark.parametrize("name", ("box_f1", "box_map", "point_in_box"))
@pytest.mark.parametrize("truth", ([[1, 2, 3]], "nowhere", {"a": 1}, [[3, 3, 1, 1]], [[0, 0, 1, float("inf")]]))
def test_boxes_that_cannot_be_read_name_row_and_column(name, truth):
    with pytest.raises(DataError, match=r"row row-1, column answer: .* box"):
        value(name, "[0, 0, 1, 1]", truth)


def test_two_hundred_boxes_are_read_and_no_more():
    many = " ".join("[0, 0, 10, 10]" for _ in range(5000))
    assert value("box_precision", many, [[0, 0, 10, 10]]) == pytest.approx(1 / 200)


def test_an_entry_needs_no_option():
    assert reward(name="box_f1").threshold is None


@pytest.mark.parametrize("name", ("iou", "giou", "ciou", "box_f1", "box_map", "vlm_r1_rec"))
@pytest.mark.parametrize("text", ("[0,0,1e200,1e200]", "[0,0,1e-200,1e-200]", "[0,0,1e12,1e12]", "[-1e12,0,1e12,1]"))
def test_boxes_beyond_all_pictures_earn_a_number(name, text):
    found = value(name, f"<answer>{text}</answer>", [0, 0, 10, 10])
    assert 0 <= found <= 1


def test_hostile_answers_take_no_time():
    started = time.perf_counter()
    assert value("point_in_box", "x=1" + " " * 200_000 + "z", [0, 0, 10, 10]) == 0.0
    assert value("vlm_r1_rec", "<answer>" * 50_000, [0, 0, 10, 10]) == 0.0
    assert time.perf_counter() - started < 30


NAMES = ("iou", "giou", "ciou", "box_precision", "box_recall", "box_f1", "box_map", "point_in_box", "vlm_r1_rec")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("truth", "says"),
    [
        ([1, 364, 980, 949], "thousandths of its sides: set data.boxes: thousandths"),
        ([0.12, 0.25, 0.48, 0.77], "fractions of its sides: set data.boxes: unit"),
        ([-14, 20, 500, 600], "lies outside its picture of 597 x 640 pixels; give pixels"),
        ([20, 30, 2000, 1500], "lies outside"),
        ([20, 30, 600, 640], "lies outside"),
        ([20, 30, 638, 590], "would lie on one of 640 x 597: give pixels of the picture as it is seen upright"),
    ],
)
def test_a_right_box_outside_its_picture_is_refused_with_its_likely_space(name, truth, says):
    size = {"original_size": (597, 640), "processed_size": (597, 640)}
    with pytest.raises(DataError, match=says):
        value(name, "<answer>[1, 2, 3, 4]</answer>", truth, size)


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_and_the_space_of_a_right_box_are_those_of_the_row(name):
    """The right box of the second picture, 1000 x 500 shown as 500 x 250, which the model writes in resized pixels."""
    images = tuple(
        SampleImage(path=None, original_size=size, processed_size=shown)
        for size, shown in (((100, 100), (100, 100)), ((1000, 500), (500, 250)))
    )
    text = "<answer>[150, 100]</answer>" if name == "point_in_box" else "<answer>[100, 50, 200, 150]</answer>"
    asked = replace(sample(text, [200, 100, 400, 300]), images=images, answer_image=1)
    assert reward(name=name).score(asked) == pytest.approx(1.0)
    thousandths = replace(asked, answer=[200, 200, 400, 600], answer_space="thousandths")
    assert reward(name=name).score(thousandths) == pytest.approx(1.0)
    shares = replace(asked, answer=[0.2, 0.2, 0.4, 0.6], answer_space="unit")
    assert reward(name=name).score(shares) == pytest.approx(1.0)
    with pytest.raises(DataError, match="answer_image"):
        reward(name=name).score(replace(asked, answer_image=None))
    with pytest.raises(DataError, match="image 2"):
        reward(name=name).score(replace(asked, answer_image=2))
    equal = replace(asked, images=(images[1], images[1]), answer_image=None)
    assert reward(name=name).score(equal) == pytest.approx(1.0)
