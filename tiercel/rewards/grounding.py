"""Rewards for boxes and points. The model writes them in its family's own coordinates, rows hold pixels of the original
first image; the model's are mapped to those."""

import re
from collections.abc import Callable, Sequence
from functools import partial

from tiercel.config.schema import Reward
from tiercel.rewards.answers import extract_answer, parse_box, parse_boxes, parse_point
from tiercel.rewards.boxes import ciou, giou, iou, to_original
from tiercel.rewards.truths import required_box, required_boxes, truth_of
from tiercel.samples import Box, Sample

DEFAULT_MATCH = 0.5
MAP_THRESHOLDS = tuple(0.5 + 0.05 * i for i in range(10))
_VLM_R1_BOX = re.compile(r"\[(\d{1,9}),\s*(\d{1,9}),\s*(\d{1,9}),\s*(\d{1,9})\]")


def iou_reward(sample: Sample, reward: Reward) -> float | None:
    """Intersection over union of the answer's first box with the row's, 0 where the answer holds no box. With
    `threshold`: 1 from that value on, else 0."""
    return _of_first_box(sample, reward, iou)


def giou_reward(sample: Sample, reward: Reward) -> float | None:
    """(GIoU + 1) / 2 of the answer's first box with the row's: boxes apart differ too; 0 where there is no box. With
    `threshold`: 1 from that value on, else 0."""
    return _of_first_box(sample, reward, lambda left, right: (giou(left, right) + 1) / 2)


def ciou_reward(sample: Sample, reward: Reward) -> float | None:
    """(CIoU + 1) / 2 of the answer's first box with the row's, at least 0; 0 where there is no box. With `threshold`:
    1 from that value on, else 0."""
    return _of_first_box(sample, reward, lambda left, right: max(0.0, (ciou(left, right) + 1) / 2))


def _of_first_box(sample: Sample, reward: Reward, overlap: Callable[[Box, Box], float]) -> float | None:
    truth = truth_of(sample, reward)
    if truth is None:
        return None
    wanted = required_box(sample, reward, truth)
    given = parse_box(extract_answer(sample.completion))
    if given is None:
        return 0.0
    value = overlap(_in_pixels(sample, given), wanted)
    return value if reward.threshold is None else float(value >= reward.threshold)


def vlm_r1_reward(sample: Sample, reward: Reward) -> float | None:
    """VLM-R1's reward for referring expressions, by its definition: the first list of four whole numbers without sign
    in the first <answer>...</answer>; far edges one pixel nearer where they bound the overlap, whose sides count one
    more.

    It differs from `iou` in that, in the first <answer> instead of the last, and in that decimals are no box.
    """
    truth = truth_of(sample, reward)
    if truth is None:
        return None
    wanted = required_box(sample, reward, truth)
    _, _, after = sample.completion.partition("<answer>")
    answer, closed, _ = after.partition("</answer>")
    found = _VLM_R1_BOX.search(answer) if closed else None
    if found is None:
        return 0.0
    x1, y1, x2, y2 = (float(number) for number in found.groups())
    given = _in_pixels(sample, (x1, y1, x2, y2))
    left, top = max(given[0], wanted[0]), max(given[1], wanted[1])
    right, bottom = min(given[2] - 1, wanted[2] - 1), min(given[3] - 1, wanted[3] - 1)
    overlap = (right - left + 1) * (bottom - top + 1) if left < right and top < bottom else 0.0
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (given, wanted))
    return overlap / (areas - overlap) if areas > overlap else 0.0


def point_in_box_reward(sample: Sample, reward: Reward) -> float | None:
    """1 where the answer's first point lies in the row's box, or in one of its boxes, edges included; else 0."""
    truth = truth_of(sample, reward)
    if truth is None:
        return None
    wanted = required_boxes(sample, reward, truth)
    given = parse_point(extract_answer(sample.completion))
    if given is None:
        return 0.0
    x, y, _, _ = _in_pixels(sample, (*given, *given))
    return float(any(x1 <= x <= x2 and y1 <= y <= y2 for x1, y1, x2, y2 in wanted))


def boxes_reward(measure: Callable[[int, int, int], float], sample: Sample, reward: Reward) -> float | None:
    """Of all boxes of the answer and of the row, paired one to one so that the most pairs overlap by `threshold`
    (0.5): the measure of pairs, given and wanted ones."""
    truth = truth_of(sample, reward)
    if truth is None:
        return None
    wanted = required_boxes(sample, reward, truth)
    given = [_in_pixels(sample, box) for box in parse_boxes(extract_answer(sample.completion))]
    if not wanted and not given:
        return 1.0
    matched = len(matched_pairs(given, wanted, DEFAULT_MATCH if reward.threshold is None else reward.threshold))
    return measure(matched, len(given), len(wanted))


def precision(pairs: int, given: int, wanted: int) -> float:
    return pairs / given if given else 0.0


def recall(pairs: int, given: int, wanted: int) -> float:
    return pairs / wanted if wanted else 0.0


def f1(pairs: int, given: int, wanted: int) -> float:
    return 2 * pairs / (given + wanted) if given + wanted else 0.0


box_precision_reward = partial(boxes_reward, precision)
box_recall_reward = partial(boxes_reward, recall)
box_f1_reward = partial(boxes_reward, f1)


def box_map_reward(sample: Sample, reward: Reward) -> float | None:
    """Mean over the overlaps 0.5, 0.55 .. 0.95 of the average precision of the answer's boxes, surest first as they
    are written: each takes the best box of the row that is still free; area under the interpolated curve."""
    truth = truth_of(sample, reward)
    if truth is None:
        return None
    wanted = required_boxes(sample, reward, truth)
    given = [_in_pixels(sample, box) for box in parse_boxes(extract_answer(sample.completion))]
    if not wanted or not given:
        return float(not wanted and not given)
    return sum(average_precision(given, wanted, threshold) for threshold in MAP_THRESHOLDS) / len(MAP_THRESHOLDS)


def average_precision(given: Sequence[Box], wanted: Sequence[Box], threshold: float) -> float:
    """Sum over right boxes, in order, of the best precision from there on, over the number of wanted ones."""
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
    """Pairs that overlap by at least `threshold`: as many as possible, and of those the ones of the largest overlap."""
    import numpy as np
    from scipy.optimize import linear_sum_assignment

    if not given or not wanted:
        return []
    overlaps = np.array([[iou(box, other) for other in wanted] for box in given])
    is_match = overlaps >= threshold - 1e-9
    # A pair more is worth more than all overlaps together.
    worth = np.where(is_match, min(len(given), len(wanted)) + 1 + overlaps, 0.0)
    rows, columns = linear_sum_assignment(worth, maximize=True)
    return [(int(i), int(j)) for i, j in zip(rows, columns, strict=True) if is_match[i, j]]


def _in_pixels(sample: Sample, box: Box) -> Box:
    image = sample.images[0]
    return to_original(box, sample.coordinate_space, image.original_size, image.processed_size)
