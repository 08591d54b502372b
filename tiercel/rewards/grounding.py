"""Define the rewards for boxes and points. The model writes coordinates as its family does, whereas rows have pixels of
the original image; the model's coordinates are converted to these pixels."""

import re
from collections.abc import Sequence
from typing import ClassVar, Literal

from tiercel.config_base import Fraction
from tiercel.reward_types import Box, Sample
from tiercel.rewards.answers import answer_of, parse_box, parse_boxes, parse_point
from tiercel.rewards.base import TruthReward
from tiercel.rewards.boxes import ciou, giou, iou, to_original
from tiercel.rewards.ground_truth import Truth

FIRST_BOX = "the first list of four numbers in the answer"
ALL_BOXES = "every list of four numbers in the answer, the first 200"
DEFAULT_MATCH = 0.5
MAP_THRESHOLDS = tuple(0.5 + 0.05 * i for i in range(10))
_VLM_R1_BOX = re.compile(r"\[(\d{1,9}),\s*(\d{1,9}),\s*(\d{1,9}),\s*(\d{1,9})\]")


class FirstBox(TruthReward):
    """The overlap of the answer's first box with the row's box."""

    reads: ClassVar[str] = FIRST_BOX
    threshold: Fraction | None = None
    """The value from which on the reward is 1, else 0; null gives the value itself."""

    def compare(self, sample: Sample, truth: Truth) -> float:
        wanted = truth.box()
        given = parse_box(answer_of(sample))
        if given is None:
            return 0.0
        value = self.overlap(_in_pixels(truth, given), wanted)
        return value if self.threshold is None else float(value >= self.threshold)

    def overlap(self, given: Box, wanted: Box) -> float:
        """Return a number from 0 to 1 for two boxes in pixels."""
        raise NotImplementedError


class Iou(FirstBox):
    """intersection over union with the row's box; 0 if there is no box"""

    name: Literal["iou"] = "iou"
    own_right_from: ClassVar[float | None] = 0.5

    def overlap(self, given: Box, wanted: Box) -> float:
        return iou(given, wanted)


class Giou(FirstBox):
    """(GIoU + 1) / 2 with the row's box: boxes apart differ too; 0 if there is no box"""

    name: Literal["giou"] = "giou"

    def overlap(self, given: Box, wanted: Box) -> float:
        return (giou(given, wanted) + 1) / 2


class Ciou(FirstBox):
    """(CIoU + 1) / 2 with the row's box, at least 0: centres and aspect ratios count; 0 if there is no box"""

    name: Literal["ciou"] = "ciou"

    def overlap(self, given: Box, wanted: Box) -> float:
        return max(0.0, (ciou(given, wanted) + 1) / 2)


class AllBoxes(TruthReward):
    """All boxes of the answer and of the row, paired one to one so that as many pairs as possible overlap."""

    reads: ClassVar[str] = ALL_BOXES
    threshold: Fraction | None = None
    """The overlap from which on two boxes are a pair; null takes 0.5."""

    def compare(self, sample: Sample, truth: Truth) -> float:
        wanted, given = truth.boxes(), _all_given(truth)
        if not wanted and not given:
            return 1.0
        matched = matched_pairs(given, wanted, DEFAULT_MATCH if self.threshold is None else self.threshold)
        return self.measure(len(matched), len(given), len(wanted))

    def measure(self, pairs: int, given: int, wanted: int) -> float:
        """Return the reward, given the number of pairs, of the answer's boxes and of the row's boxes; the last two are
        not both 0."""
        raise NotImplementedError


class BoxPrecision(AllBoxes):
    """of the answer's boxes the share that is paired with one of the row's, one to one, so that as many pairs as
    possible overlap by `threshold` (0.5)"""

    name: Literal["box_precision"] = "box_precision"

    def measure(self, pairs: int, given: int, wanted: int) -> float:
        return pairs / given if given else 0.0


class BoxRecall(AllBoxes):
    """of the row's boxes the share that is paired"""

    name: Literal["box_recall"] = "box_recall"

    def measure(self, pairs: int, given: int, wanted: int) -> float:
        return pairs / wanted if wanted else 0.0


class BoxF1(AllBoxes):
    """2 x pairs / (boxes of the answer + boxes of the row); 1 if both have none"""

    name: Literal["box_f1"] = "box_f1"
    own_right_from: ClassVar[float | None] = 1.0

    def measure(self, pairs: int, given: int, wanted: int) -> float:
        return 2 * pairs / (given + wanted)


class BoxMap(TruthReward):
    """mean over the overlaps 0.5, 0.55 .. 0.95 of the average precision; each box takes the best box of the row that is
    still free"""

    name: Literal["box_map"] = "box_map"
    reads: ClassVar[str] = f"{ALL_BOXES}, surest first"

    def compare(self, sample: Sample, truth: Truth) -> float:
        wanted, given = truth.boxes(), _all_given(truth)
        if not wanted or not given:
            return float(not wanted and not given)
        return sum(average_precision(given, wanted, threshold) for threshold in MAP_THRESHOLDS) / len(MAP_THRESHOLDS)


class PointInBox(TruthReward):
    """1 if it lies in the row's box, or in one of its boxes, edges included, else 0"""

    name: Literal["point_in_box"] = "point_in_box"
    reads: ClassVar[str] = "the first pair of numbers in the answer, unless a box comes first"
    own_right_from: ClassVar[float | None] = 1.0

    def compare(self, sample: Sample, truth: Truth) -> float:
        wanted = truth.boxes()
        given = parse_point(answer_of(sample))
        if given is None:
            return 0.0
        x, y, _, _ = _in_pixels(truth, (*given, *given))
        return float(any(x1 <= x <= x2 and y1 <= y <= y2 for x1, y1, x2, y2 in wanted))


class VlmR1Rec(TruthReward):
    """VLM-R1's reward for referring expressions by its own definition: far edges one pixel nearer in the overlap, whose
    sides count one more"""

    name: Literal["vlm_r1_rec"] = "vlm_r1_rec"
    reads: ClassVar[str] = "the first `[x1, y1, x2, y2]` of whole numbers in the first `<answer>...</answer>`"
    own_right_from: ClassVar[float | None] = 0.5

    def compare(self, sample: Sample, truth: Truth) -> float:
        wanted = truth.box()
        _, _, after = sample.completion.partition("<answer>")
        answer, closed, _ = after.partition("</answer>")
        found = _VLM_R1_BOX.search(answer) if closed else None
        if found is None:
            return 0.0
        x1, y1, x2, y2 = (float(number) for number in found.groups())
        given = _in_pixels(truth, (x1, y1, x2, y2))
        left, top = max(given[0], wanted[0]), max(given[1], wanted[1])
        right, bottom = min(given[2] - 1, wanted[2] - 1), min(given[3] - 1, wanted[3] - 1)
        overlap = (right - left + 1) * (bottom - top + 1) if left < right and top < bottom else 0.0
        areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (given, wanted))
        return overlap / (areas - overlap) if areas > overlap else 0.0


GROUNDING = (Iou, Giou, Ciou, BoxPrecision, BoxRecall, BoxF1, BoxMap, PointInBox, VlmR1Rec)


def average_precision(given: Sequence[Box], wanted: Sequence[Box], threshold: float) -> float:
    """Compute the average precision: add, for each right box, the best precision from its position on, and divide by
    the number of wanted boxes."""
    free, right = list(wanted), 0
    precisions: list[tuple[bool, float]] = []
    for place, box in enumerate(given, 1):
        best = max(free, key=lambda other: iou(box, other), default=None)
        is_right = best is not None and iou(box, best) >= threshold - 1e-9
        if is_right and best is not None:
            free.remove(best)
            right += 1
        precisions.append((is_right, right / place))
    total, highest = 0.0, 0.0
    for is_right, value in reversed(precisions):
        highest = max(highest, value)
        total += highest if is_right else 0.0
    return total / len(wanted)


def matched_pairs(given: Sequence[Box], wanted: Sequence[Box], threshold: float) -> list[tuple[int, int]]:
    """Pair boxes that overlap by at least `threshold`: as many pairs as possible, and among these solutions the largest
    sum of overlaps."""
    import numpy as np
    from scipy.optimize import linear_sum_assignment

    if not given or not wanted:
        return []
    overlaps = np.array([[iou(box, other) for other in wanted] for box in given])
    is_match = overlaps >= threshold - 1e-9
    # One more pair is worth more than all overlaps together.
    worth = np.where(is_match, min(len(given), len(wanted)) + 1 + overlaps, 0.0)
    rows, columns = linear_sum_assignment(worth, maximize=True)
    return [(int(i), int(j)) for i, j in zip(rows, columns, strict=True) if is_match[i, j]]


def _all_given(truth: Truth) -> list[Box]:
    return [_in_pixels(truth, box) for box in parse_boxes(answer_of(truth.sample))]


def _in_pixels(truth: Truth, box: Box) -> Box:
    image, space = truth.picture, truth.sample.coordinate_space
    assert space is not None  # the scorer refuses these rewards if it is not known
    return to_original(box, space, image.original_size, image.processed_size)
