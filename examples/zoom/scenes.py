"""Large scenes for the demo of a tool: nine small handwritten digits, one of them in a red ring.

The model sees a scene reduced to a seventh, in which the ring is visible but the digits cannot be told apart. The tool
`zoom` cuts from the original.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from examples.scenes import SIDE, paper, paste
from tiercel.demo.handwriting import Box, dialogue, held_out, load_digit_images, save_picture, write_rows
from tiercel.environments.tools import PictureTools, SeenPicture
from tiercel.types import ImagePlan

REDUCTION = 7
LARGE_SIDE = SIDE * REDUCTION  # pixels of a scene
CENTRES = tuple((x, y) for y in (133, 392, 651) for x in (133, 392, 651))  # of the places of the digits
DIGIT = 8  # pixels of a digit's side, as in scikit-learn; about one pixel of what the model sees
JITTER = 2  # pixels by which a digit may be away from the centre of its place
REACH = 7  # pixels from a place's centre to the edges of the region that shows it
RING = (48, 64)  # inner and outer radius in pixels, from a place's centre
RED = (230, 30, 30)

QUESTION = "<image>Which digit is in the ring?"
_PAPER = paper(LARGE_SIDE).astype(np.uint8)


@dataclass(frozen=True, kw_only=True, slots=True)
class LargeScene:
    """A picture with nine digits, and the place of the ring."""

    image: Image.Image
    digits: tuple[int, ...]  # by place
    boxes: tuple[Box, ...]  # of the digits, in pixels
    marked: int


def draw_large_scene(images: np.ndarray, labels: np.ndarray, generator: np.random.Generator) -> LargeScene:
    """Draw a digit near each of CENTRES, and a ring around one of them."""
    canvas = _PAPER.copy()
    picks = generator.integers(len(images), size=len(CENTRES))
    offsets = generator.integers(-JITTER, JITTER + 1, size=(len(CENTRES), 2)) - DIGIT // 2
    boxes = []
    for pick, centre, offset in zip(picks, CENTRES, offsets, strict=True):
        left, top = (int(v) for v in np.add(centre, offset))
        boxes.append((left, top, left + DIGIT, top + DIGIT))
        there = canvas[top : top + DIGIT, left : left + DIGIT].astype(float)
        paste(there, images[pick], (0, 0, DIGIT, DIGIT), generator)
        canvas[top : top + DIGIT, left : left + DIGIT] = there
    marked = int(generator.integers(len(CENTRES)))
    picture = Image.fromarray(canvas)
    (x, y), (inner, outer) = CENTRES[marked], RING
    ImageDraw.Draw(picture).ellipse((x - outer, y - outer, x + outer, y + outer), outline=RED, width=outer - inner)
    return LargeScene(image=picture, digits=tuple(labels[picks].tolist()), boxes=tuple(boxes), marked=marked)


def region(place: int) -> list[int]:
    """Return the box around a place as the model writes it, in pixels of the picture that the model sees."""
    x, y = CENTRES[place]
    return [v // REDUCTION for v in (x - REACH, y - REACH, x + REACH, y + REACH)]


def write_questions(directory: Path, name: str, count: int, seed: int, *, use_held_out: bool) -> None:
    """Write `directory`/`name`.jsonl and its images: the question, and the digit in the ring."""
    rows = []
    for number, (scene, _) in enumerate(scenes(count, seed, use_held_out)):
        file = save_picture(scene.image, directory, f"{name}-{number:05d}")
        row = dialogue(f"{name}-{number}", [file], [QUESTION])
        rows.append({**row, "answer": scene.digits[scene.marked], "digit_box": scene.boxes[scene.marked]})
    write_rows(directory / f"{name}.jsonl", rows)


def zoomed(scene: Image.Image, place: int) -> Image.Image:
    """Return what the tool shows of a place."""
    plan = ImagePlan(original_size=scene.size, processed_size=(SIDE, SIDE), grid=(), token_count=0)
    tools = PictureTools([SeenPicture(original=lambda: scene, plan=plan)], "resized_pixels")
    return tools.zoom([float(v) for v in region(place)])


def scenes(count: int, seed: int, use_held_out: bool) -> Iterator[tuple[LargeScene, np.random.Generator]]:
    """Yield `count` scenes of digits that are held out or not, each with the generator."""
    images, labels = load_digit_images()
    chosen = held_out(len(images)) == use_held_out
    generator = np.random.default_rng(seed)
    for _ in range(count):
        yield draw_large_scene(images[chosen], labels[chosen], generator), generator
