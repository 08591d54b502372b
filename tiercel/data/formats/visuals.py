"""Read the pictures, videos and boxes of a record, as the formats write them. Pictures may be embedded: as bytes, as
base64 text, or as a data: URL."""

import base64
import binascii
import json
import re
from collections.abc import Mapping
from typing import Any

from tiercel.data.media.images import require_path
from tiercel.data.record_values import given, is_filled, is_number, whole, wrong_value
from tiercel.data.texts import told
from tiercel.errors import DataError
from tiercel.types import Box, ImageSource, Point, VideoSource

_MOST_FPS = 1000.0
_DATA_URL = re.compile(r"data:[a-z0-9.+/-]*(?:;[a-z0-9=.-]+)*;base64,", re.IGNORECASE)
# How base64 of PNG, JPEG and WEBP begins. A path could begin in the same way, but would not be as long.
_BEGINNINGS = ("iVBORw0KGgo", "/9j/", "UklGR")
_SHORTEST = 64  # characters; even a picture of one pixel has more


def read_images(record: Mapping[str, Any]) -> tuple[ImageSource, ...]:
    """Read images from `images` or `image`: a path or a {"bytes", "path"} object, or a list of them."""
    return tuple(read_image(value, field) for field, value in _visuals(record, "image").items())


def read_videos(record: Mapping[str, Any]) -> tuple[VideoSource, ...]:
    """Read videos from `videos` or `video`: a path or {"path", "fps"} of a file, a list of the paths of its frames, or
    {"frames", "fps"}."""
    return tuple(read_video(value, field) for field, value in _visuals(record, "video").items())


def _visuals(record: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return what a record has under `kind` or its plural, by field."""
    if is_filled(record.get(kind)) and is_filled(record.get(f"{kind}s")):
        raise DataError(f"the row has both `{kind}` and `{kind}s`; keep one", field=f"{kind}s")
    key = kind if is_filled(record.get(kind)) else f"{kind}s"
    value = _listed(record.get(key), key)
    if not is_filled(value) or (isinstance(value, list) and all(map(_is_null, value))):
        return {}
    if key == "video" or not isinstance(value, list):  # a list under `video` is the frames of one video
        return {key: value}
    return {f"{key}[{number}]": item for number, item in enumerate(value)}


def _listed(value: Any, field: str) -> Any:
    """Parse a list of files that is JSON text, as in tables of CSV; anything else stays as it is. Raises DataError for
    a list as Python prints it."""
    if not isinstance(value, str) or not value.startswith("["):
        return value
    try:
        listed = json.loads(value)
    except (ValueError, RecursionError) as error:
        if value.startswith("['") and value.endswith("']"):
            raise DataError("is a list as printed by Python; use the list itself, or JSON", field=field) from error
        return value
    return listed if isinstance(listed, list) else value


def _is_null(value: Any) -> bool:
    """Return whether a table has nothing in a list's only place: null, or an object of nulls."""
    return value is None or (isinstance(value, Mapping) and bool(value) and not is_filled(value))


def read_video(value: Any, field: str) -> VideoSource:
    described: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
    if described.get("type") == "video" and "path" not in described:  # as verl and qwen-vl-utils have it
        key = "frames" if isinstance(described.get("video"), list) else "path"
        described = {key if name == "video" else name: each for name, each in described.items() if name != "type"}
    if given(described, "frames") and given(described, "sample_fps") and not given(described, "fps"):
        described = {**described, "fps": described["sample_fps"], "sample_fps": None}
    if not described:
        described = {"frames" if isinstance(value, list) else "path": value}
    unknown = [key for key in described if key not in ("path", "frames", "fps") and given(described, key)]
    path, frames, fps = described.get("path"), described.get("frames"), described.get("fps")
    if unknown or (path is None) == (frames is None):
        forms = 'a video must be a path, a list of its frames\' paths, {"path", "fps"} or {"frames", "fps"}'
        raise wrong_value(value, forms, field)
    if fps is not None and not (is_number(fps) and 0 < fps <= _MOST_FPS):
        raise wrong_value(fps, f"frames per second must be a number above 0 and at most {_MOST_FPS:g}", f"{field}.fps")
    rate = None if fps is None else float(fps)
    if frames is not None:
        if not isinstance(frames, list) or not frames:
            raise wrong_value(frames, "it must be a list of paths, at least one", f"{field}.frames")
        sources = tuple(read_image(frame, f"{field}.frames[{number}]") for number, frame in enumerate(frames))
        return VideoSource(path=sources[0].path or "(embedded frames)", frames=sources, fps=rate)
    if not isinstance(path, str):
        raise wrong_value(path, "it must be a path", field)
    require_path(path, field)
    return VideoSource(path=path, fps=rate)


def read_image(value: Any, field: str) -> ImageSource:
    """Read a picture: a path, a data: URL, its bytes, {"bytes", "path"}, or verl's {"image"}."""
    if isinstance(value, bytes):
        return ImageSource(data=value)
    path, data = value, None
    if isinstance(value, dict | Mapping):
        path, data = value.get("path"), value.get("bytes")
        path = value.get("image") if path is None and isinstance(value.get("image"), str) else path
    if isinstance(text := path if data is None else data, str):
        data = _embedded_picture(text, field) or data
        path = path if text is not path else None if isinstance(data, bytes) else path
    if isinstance(data, bytes) and (path is None or isinstance(path, str)):
        return ImageSource(path=path, data=data)  # if there are bytes, the path is only a name
    if data is not None or not isinstance(path, str):
        raise wrong_value(value, 'it must be a path or {"bytes": ..., "path": ...}', field)
    require_path(path, field)
    return ImageSource(path=path)


def _embedded_picture(text: str, field: str) -> bytes | None:
    """Return the bytes of a picture that is written as base64; None for any other text, such as a path. Raises
    DataError if the text begins as base64 but is not valid base64 to its end."""
    url = _DATA_URL.match(text)
    if url is None and (len(text) < _SHORTEST or not text.startswith(_BEGINNINGS) or "." in text[-6:]):
        return None
    try:
        return base64.b64decode("".join(text[url.end() if url else 0 :].split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise DataError(told("damaged base64", len(text), error), field=field) from error


def read_boxes(value: Any, field: str) -> tuple[Box | Point, ...]:
    """Read boxes and points from a list of [x1, y1, x2, y2] and [x, y]."""
    if not isinstance(value, list):
        raise wrong_value(value, "it must be a list of boxes", field)
    return tuple(_read_box(box, f"{field}[{number}]") for number, box in enumerate(value))


def _read_box(value: Any, field: str) -> Box | Point:
    numbers = value if isinstance(value, list) else []
    if len(numbers) not in (2, 4) or not all(is_number(number) for number in numbers):
        raise wrong_value(value, "a box must be 4 finite numbers [x1, y1, x2, y2], and a point 2: [x, y]", field)
    if len(numbers) == 2:
        return float(numbers[0]), float(numbers[1])
    x1, y1, x2, y2 = map(float, numbers)
    if x2 <= x1 or y2 <= y1:
        raise wrong_value(value, "a box must have x2 > x1 and y2 > y1", field)
    return x1, y1, x2, y2


def read_box_images(value: Any, field: str, box_count: int) -> tuple[int, ...]:
    """Read the image number of each box; 0 for all if none are given."""
    if value is None or value == []:
        return (0,) * box_count
    value = list(map(whole, value)) if isinstance(value, list) else value
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        raise wrong_value(value, "it must be a list of image numbers, counted from 0", field)
    if len(value) != box_count:
        raise DataError(f"has {len(value)} image numbers for {box_count} boxes", field=field)
    return tuple(value)


def read_image_number(value: Any, field: str) -> int | None:
    """Read the number of an image; None if none is given."""
    value = whole(value)
    if value is None or type(value) is int:
        return value
    raise wrong_value(value, "it must be the number of an image, counted from 0", field)
