"""Overlap of boxes (x1, y1, x2, y2), and the way between a model's coordinates and the original image's pixels."""

from tiercel.geometry import from_original as from_original
from tiercel.geometry import to_original as to_original
from tiercel.samples import Box


def is_proper(box: Box) -> bool:
    """Whether the box has an area: x1 < x2 and y1 < y2."""
    x1, y1, x2, y2 = box
    return x1 < x2 and y1 < y2


def iou(left: Box, right: Box) -> float:
    """Intersection over union of two boxes in the same space, 0 to 1.

    An empty or inverted box overlaps nothing: its corners are not swapped, and the result is 0.
    """
    if not (is_proper(left) and is_proper(right)):
        return 0.0
    width = min(left[2], right[2]) - max(left[0], right[0])
    height = min(left[3], right[3]) - max(left[1], right[1])
    if width <= 0 or height <= 0:
        return 0.0
    intersection = width * height
    return intersection / (_area(left) + _area(right) - intersection)


def _area(box: Box) -> float:
    x1, y1, x2, y2 = box
    return (x2 - x1) * (y2 - y1)
