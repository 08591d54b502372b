"""Boxes in the coordinate spaces of models. Boxes are (x1, y1, x2, y2), sizes are (width, height) in pixels."""

from tiercel.samples import Box, CoordinateSpace, Size


def _extent(space: CoordinateSpace, processed_size: Size) -> tuple[float, float]:
    """Return (x, y) of the image's lower right corner in `space`."""
    if space == "resized_pixels":
        return float(processed_size[0]), float(processed_size[1])
    return (1000.0, 1000.0) if space == "thousandths" else (1.0, 1.0)


def to_original(box: Box, space: CoordinateSpace, original_size: Size, processed_size: Size) -> Box:
    """Convert a box that the model wrote in `space` to pixels of the original image."""
    return _scaled(box, _extent(space, processed_size), original_size)


def from_original(box: Box, space: CoordinateSpace, original_size: Size, processed_size: Size) -> Box:
    """Convert a box in pixels of the original image to `space`, as the model should write it."""
    return _scaled(box, original_size, _extent(space, processed_size))


def _scaled(box: Box, old: tuple[float, float], new: tuple[float, float]) -> Box:
    x, y = new[0] / old[0], new[1] / old[1]
    return box[0] * x, box[1] * y, box[2] * x, box[3] * y
