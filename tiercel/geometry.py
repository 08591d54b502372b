"""Boxes in the coordinate spaces of models. Boxes are (x1, y1, x2, y2), sizes are (width, height) in pixels."""

from tiercel.samples import Box, CoordinateSpace, Size


def _extent(space: CoordinateSpace, processed_size: Size) -> tuple[float, float]:
    """Return (x, y) of the image's lower right corner in `space`."""
    if space == "resized_pixels":
        return float(processed_size[0]), float(processed_size[1])
    return (1000.0, 1000.0) if space == "thousandths" else (1.0, 1.0)


def to_original(box: Box, space: CoordinateSpace, original_size: Size, processed_size: Size) -> Box:
    """Convert a box that the model wrote in `space` to pixels of the original image."""
    width, height = _extent(space, processed_size)
    x, y = original_size[0] / width, original_size[1] / height
    return box[0] * x, box[1] * y, box[2] * x, box[3] * y


def from_original(box: Box, space: CoordinateSpace, original_size: Size, processed_size: Size) -> Box:
    """Convert a box in pixels of the original image to `space`, as the model should write it."""
    width, height = _extent(space, processed_size)
    x, y = width / original_size[0], height / original_size[1]
    return box[0] * x, box[1] * y, box[2] * x, box[3] * y
