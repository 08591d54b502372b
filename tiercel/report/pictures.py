"""Pictures with boxes drawn over them, embedded in the page up to a limit of number and bytes."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from tiercel.report.markup import Html, element, fragment
from tiercel.report.numbers import TIMES
from tiercel.rewards.answers import extract_answer, parse_box
from tiercel.rewards.boxes import is_proper, to_original
from tiercel.runs.group_records import CompletionRecord, GroupRecord, ImageRecord, finite
from tiercel.samples import Box, Size

MOST_IMAGES = 60
MOST_IMAGE_BYTES = 4_000_000  # in the page, as base64

_LONGEST_SIDE = 480  # pixels embedded
_SHOWN = (336, 272)  # pixels on the page, at most
_LARGEST_ZOOM = 4
_PIXELATED_BELOW = 160  # pixels: smaller pictures are shown with visible pixels, not smoothed
_LARGEST_PNG = 30_000
_JPEG_QUALITY = 82


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """A box to draw, in pixels of the original image."""

    box: Box
    style: str  # class of the style sheet
    label: str  # for readers who cannot see the picture
    tag: str = ""  # written at the box's corner


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The box of a completion in pixels of the original image; `missing` says why there is none."""

    box: Box | None
    missing: str


class Album:
    """The run's images as data: URIs. It counts how much the page may still take."""

    def __init__(self, folder: Path, most_images: int = MOST_IMAGES, most_bytes: int = MOST_IMAGE_BYTES):
        self._folder = folder
        self._images_left = most_images
        self._bytes_left = most_bytes
        self.left_out = 0
        self.missing: dict[str, str] = {}  # reason by file name

    def take(self, sha256: str) -> tuple[str, bool] | None:
        """Return a data: URI, and whether to show it with visible pixels; None where the file is missing or the page is
        full."""
        file = self._folder / f"{sha256}.png"
        if self._images_left < 1:
            self.left_out += 1
            return None
        try:
            with Image.open(file, formats=("PNG",)) as image:
                text, is_small = embedded(image.convert("RGB"))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            self.missing[file.name] = type(error).__name__
            return None
        if len(text) > self._bytes_left:
            self.left_out += 1
            return None
        self._images_left -= 1
        self._bytes_left -= len(text)
        return text, is_small


def embedded(image: Image.Image) -> tuple[str, bool]:
    """Return an RGB picture as a data: URI, and whether to show it with visible pixels."""
    is_small = max(image.size) < _PIXELATED_BELOW
    kind, data = _small(image)
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}", is_small


def _small(image: Image.Image) -> tuple[str, bytes]:
    """Reduce the picture to the size of the page: PNG where that is small, else JPEG."""
    image.thumbnail((_LONGEST_SIDE, _LONGEST_SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    if buffer.tell() <= _LARGEST_PNG:
        return "png", buffer.getvalue()
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=_JPEG_QUALITY, optimize=True)
    return "jpeg", buffer.getvalue()


def true_box(group: GroupRecord) -> Box | None:
    """Return the row's right box; None where its answer is no box."""
    answer = group.answer
    if not group.images:
        return None
    if isinstance(answer, str) and _is_scored_by_iou(group):
        box = parse_box(extract_answer(answer))
    elif isinstance(answer, list | tuple) and len(answer) == 4:
        sides = [side for side in map(finite, answer) if side is not None]
        box = (sides[0], sides[1], sides[2], sides[3]) if len(sides) == 4 else None
    else:
        box = None
    return box if box is not None and is_proper(box) else None


def has_boxes(group: GroupRecord) -> bool:
    """Whether the completions of the prompt should hold boxes."""
    return bool(group.images) and (true_box(group) is not None or _is_scored_by_iou(group))


def _is_scored_by_iou(group: GroupRecord) -> bool:
    return any(name == "iou" or name.startswith("iou_") for name in group.completions[0].rewards)


def predicted_box(group: GroupRecord, completion: CompletionRecord) -> Prediction:
    """Read the completion's box on the prompt's first image, with the parser that training uses."""
    written = parse_box(extract_answer(completion.text))
    if written is None:
        return Prediction(box=None, missing="no box")
    if group.coordinate_space is None:
        return Prediction(box=None, missing="coordinates unknown")
    image = group.images[0]
    box = to_original(written, group.coordinate_space, image.original_size, image.processed_size)
    return Prediction(box=box, missing="")


def box_text(box: Box) -> str:
    """Format a box in whole pixels, for a table."""
    return ", ".join(f"{side:.0f}" if abs(side) < 1e7 else f"{side:.0e}" for side in box)


def pictures(album: Album, group: GroupRecord, outlines: Sequence[Outline], most: int = 4) -> Html | None:
    """Show the prompt's images, with boxes over the first; None for a prompt without images."""
    if not group.images:
        return None
    shown = [
        _picture(album, image, outlines if number == 0 else ()) for number, image in enumerate(group.images[:most])
    ]
    more = len(group.images) - most
    rest = element("p", f"and {more} more image{'s' if more > 1 else ''}", class_="aside") if more > 0 else None
    return element("div", shown, rest, class_="pictures")


def _picture(album: Album, image: ImageRecord, outlines: Sequence[Outline]) -> Html:
    name = image.path or f"{image.sha256[:12]}.png"
    caption = f"{name}, {image.original_size[0]} {TIMES} {image.original_size[1]}"
    taken = album.take(image.sha256)
    if taken is None:
        is_lost = f"{image.sha256}.png" in album.missing
        reason = "images/ has no readable file for it" if is_lost else "left out: the page's share of images is used up"
        empty = element("p", reason, class_="no-picture")
        return element("figure", empty, element("figcaption", caption), class_="picture")
    return figure(taken, name, caption, image.original_size, outlines)


def figure(taken: tuple[str, bool], name: str, caption: str, original: Size, outlines: Sequence[Outline]) -> Html:
    """Show an embedded picture with boxes over it; boxes are in pixels of the original."""
    uri, is_small = taken
    size = _shown_size(original)
    boxes = ", ".join(f"{outline.label} [{box_text(outline.box)}]" for outline in outlines)
    return element(
        "figure",
        element(
            "svg",
            element(
                "image",
                href=uri,
                width=size[0],
                height=size[1],
                preserveAspectRatio="none",
                class_="squares" if is_small else None,
            ),
            [_drawn(outline, original, size) for outline in outlines],
            viewBox=f"0 0 {size[0]} {size[1]}",
            width=size[0],
            height=size[1],
            role="img",
            aria_label=f"{name}; boxes: {boxes}" if boxes else name,
        ),
        element("figcaption", caption),
        class_="picture",
    )


def _shown_size(original: Size) -> Size:
    zoom = min(_SHOWN[0] / original[0], _SHOWN[1] / original[1], _LARGEST_ZOOM)
    return max(8, round(original[0] * zoom)), max(8, round(original[1] * zoom))


def _drawn(outline: Outline, original: Size, shown: Size) -> Html:
    """Draw a box. Corners are sorted and kept close to the picture, because a completion may write any number."""
    x1, x2 = sorted(_placed(side, original[0], shown[0]) for side in (outline.box[0], outline.box[2]))
    y1, y2 = sorted(_placed(side, original[1], shown[1]) for side in (outline.box[1], outline.box[3]))
    frame = {"x": x1, "y": y1, "width": max(1.0, x2 - x1), "height": max(1.0, y2 - y1)}
    tag = None
    if outline.tag:
        place = {"x": min(max(x1 + 3, 2.0), shown[0] - 14.0), "y": min(max(y1 + 12, 12.0), shown[1] - 3.0)}
        tag = element("text", outline.tag, **place)
    return element(
        "g",
        fragment(element("rect", class_="halo", **frame), element("rect", class_="edge", **frame), tag),
        class_=f"outline {outline.style}",
        data_box=outline.tag or None,
    )


def _placed(side: float, original: int, shown: int) -> float:
    return min(max(side / original, -1.0), 2.0) * shown
