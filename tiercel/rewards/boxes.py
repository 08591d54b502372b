"""Compute the overlap of boxes (x1, y1, x2, y2)."""

import math

from tiercel.geometry import from_original as from_original
from tiercel.geometry import to_original as to_original
from tiercel.reward_types import Box


def is_proper(box: Box) -> bool:
    """Return whether the box has an area: x1 < x2 and y1 < y2."""
    x1, y1, x2, y2 = box
    return x1 < x2 and y1 < y2


def iou(left: Box, right: Box) -> float:
    """Compute the intersection over union of two boxes in the same space, 0 to 1.

    An empty or inverted box overlaps nothing: its corners are not swapped, and the result is 0.
    """
    if not (is_proper(left) and is_proper(right)):
        return 0.0
    width = min(left[2], right[2]) - max(left[0], right[0])
    height = min(left[3], right[3]) - max(left[1], right[1])
    if width <= 0 or height <= 0:
        return 0.0
    intersection = width * height
    union = _area(left) + _area(right) - intersection
    return intersection / union if union > 0 else 0.0


def _area(box: Box) -> float:
    x1, y1, x2, y2 = box
    return (x2 - x1) * (y2 - y1)


def giou(left: Box, right: Box) -> float:
    """Compute the generalised IoU, -1 to 1: IoU minus the share of the smallest enclosing box that neither box covers
    (Rezatofighi et al. 2019). -1 for an empty or inverted box."""
    if not (is_proper(left) and is_proper(right)):
        return -1.0
    enclosing = _area(_enclosing(left, right))
    if enclosing <= 0:  # the sides are so small that their product is 0
        return -1.0
    overlap = iou(left, right)
    union = (_area(left) + _area(right)) / (1 + overlap)
    return overlap - (enclosing - union) / enclosing


def ciou(left: Box, right: Box) -> float:
    """Compute the complete IoU: IoU minus the squared distance of the centres relative to the squared diagonal of the
    enclosing box, and minus a term for unequal aspect ratios (Zheng et al. 2020). -1 for an empty or inverted box;
    never below -2."""
    if not (is_proper(left) and is_proper(right)):
        return -1.0
    overlap = iou(left, right)
    x1, y1, x2, y2 = _enclosing(left, right)
    diagonal = (x2 - x1) ** 2 + (y2 - y1) ** 2
    if diagonal <= 0:
        return -1.0
    across = (left[0] + left[2] - right[0] - right[2]) / 2
    down = (left[1] + left[3] - right[1] - right[3]) / 2
    difference = 4 / math.pi**2 * (_angle(left) - _angle(right)) ** 2
    weight = difference / (1 - overlap + difference) if difference else 0.0
    return overlap - (across**2 + down**2) / diagonal - weight * difference


def _angle(box: Box) -> float:
    return math.atan2(box[2] - box[0], box[3] - box[1])


def _enclosing(left: Box, right: Box) -> Box:
    return min(left[0], right[0]), min(left[1], right[1]), max(left[2], right[2]), max(left[3], right[3])
