"""Boxes in the coordinate spaces of models and rows. Boxes are (x1, y1, x2, y2), sizes are (width, height) in
pixels."""

from collections.abc import Sequence
from typing import TypeVar

from tiercel.reward_types import Box, BoxSpace, CoordinateSpace, Point, Size

Shape = TypeVar("Shape", bound=Box | Point)
ROUNDING = 1.0  # pixels by which a box may extend beyond its picture


def _extent(space: CoordinateSpace, processed_size: Size) -> tuple[float, float]:
    """Return (x, y) of the image's lower right corner in `space`."""
    if space == "resized_pixels":
        return float(processed_size[0]), float(processed_size[1])
    return (1000.0, 1000.0) if space == "thousandths" else (1.0, 1.0)


def to_original(box: Box, space: CoordinateSpace, original_size: Size, processed_size: Size) -> Box:
    """Convert a box that the model wrote in `space` to pixels of the original image."""
    return _scaled(box, _extent(space, processed_size), original_size)


def from_original(box: Shape, space: CoordinateSpace, original_size: Size, processed_size: Size) -> Shape:
    """Convert a box or a point in pixels of the original image to `space`, as the model should write it."""
    return _scaled(box, original_size, _extent(space, processed_size))


def to_pixels(box: Shape, space: BoxSpace, size: Size) -> Shape:
    """Convert a box or a point of a row to pixels of its picture."""
    if space == "pixels":
        return box
    side = 1000.0 if space == "thousandths" else 1.0
    return _scaled(box, (side, side), size)


def misfit(box: Sequence[float], space: BoxSpace, size: Size) -> str | None:
    """Return why a box or a point in pixels, which a row gave in `space`, cannot be on a picture of `size`, and what it
    may be instead. Returns None if it is on the picture, up to a pixel of rounding."""
    x, y = box[::2], box[1::2]
    inside = min(box) >= -ROUNDING and max(x) <= size[0] + ROUNDING and max(y) <= size[1] + ROUNDING
    may_be_small = len(box) == 2 and all(side.is_integer() for side in box)  # a point at the corner
    if inside and (space != "pixels" or max(box) > 1 or may_be_small):
        return None
    place = f"its picture of {size[0]} x {size[1]} pixels"
    if space != "pixels":
        return f"lies outside {place} when read as {space}; correct the row, or the setting that names this space"
    if min(box) >= 0 and max(box) <= 1:
        return f"is smaller than a pixel of {place}; these look like fractions of its sides: set data.boxes: unit"
    if min(box) >= -100 and max(box) <= 1100 and max(max(x) / size[0], max(y) / size[1]) > 1.1:
        return f"lies outside {place}; these look like thousandths of its sides: set data.boxes: thousandths"
    if min(box) >= -ROUNDING and max(x) <= size[1] + ROUNDING and max(y) <= size[0] + ROUNDING:
        return (
            f"lies outside {place}; it would lie on one of {size[1]} x {size[0]}: give pixels of the picture as it is "
            "seen upright, if its EXIF data turn it, and x before y"
        )
    return f"lies outside {place}; give pixels of the original picture, x before y, or set the space with data.boxes"


def outline_of(box: Box | Point) -> Box:
    """Return a point as a box without an area, for drawing."""
    return box if len(box) == 4 else (*box, *box)


def clipped(box: Shape, size: Size) -> Shape:
    """Clip a box or a point in pixels to its picture of `size`."""
    return tuple(min(max(side, 0.0), float(size[place % 2])) for place, side in enumerate(box))  # type: ignore[return-value]


def _scaled(box: Shape, old: tuple[float, float], new: tuple[float, float]) -> Shape:
    factors = new[0] / old[0], new[1] / old[1]
    return tuple(side * factors[place % 2] for place, side in enumerate(box))  # type: ignore[return-value]
