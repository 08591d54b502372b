"""Large scenes for the demo of a tool: nine small handwritten digits, one of them in a red ring.

The model sees a scene reduced to a seventh, in which it can see the ring but not tell the digits. The tool `zoom` cuts
from the original.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from tiercel.demo.scenes import SIDE, Box, held_out, load_digit_images, paper, paste
from tiercel.environments.tools import Picture, PictureTools
from tiercel.types import ImagePlan

REDUCTION = 7
LARGE_SIDE = SIDE * REDUCTION  # pixels of a scene
CENTRES = tuple((x, y) for y in (133, 392, 651) for x in (133, 392, 651))  # of the places
DIGIT = 8  # pixels of a digit's side, as scikit-learn has it: one pixel of what the model sees
JITTER = 2  # pixels by which a digit may be off the centre of its place
REACH = 7  # pixels from a place's centre to the edges of the region that shows it
RING = (48, 64)  # pixels from a place's centre
RED = (230, 30, 30)

QUESTION = "<image>Which digit is in the ring?"
WHERE = "<image>Where is the ring?"
# As the start's chat template writes them.
TOOLS = "Tools: zoom(box, label, image)"
SHOWN = "<tool_response>image 2\n<image></tool_response>"

# Of the start's supervised rows that call the tool: where they look. Seldom at the ring, so that GRPO has to find it.
LOOKS_AT_FIRST, LOOKS_AT_RING = 0.5, 0.3

_PAPER = paper(LARGE_SIDE).astype(np.uint8)


@dataclass(frozen=True, kw_only=True, slots=True)
class LargeScene:
    """A picture with nine digits, and the place that has the ring."""

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
    """Return the box around a place as the model writes it, in pixels of the picture that it sees."""
    x, y = CENTRES[place]
    return [v // REDUCTION for v in (x - REACH, y - REACH, x + REACH, y + REACH)]


def write_questions(directory: Path, name: str, count: int, seed: int, *, use_held_out: bool) -> None:
    """Write `directory`/`name`.jsonl and its images: the question and the digit in the ring."""
    rows = []
    for number, (scene, _) in enumerate(_scenes(count, seed, use_held_out)):
        file = _saved(scene.image, directory, f"{name}-{number:05d}")
        row = _row(f"{name}-{number}", [file], [QUESTION])
        rows.append({**row, "answer": scene.digits[scene.marked], "digit_box": scene.boxes[scene.marked]})
    _write(directory / f"{name}.jsonl", rows)


def write_lessons(directory: Path, name: str, count: int, seed: int, *, use_held_out: bool) -> None:
    """Write `directory`/`name`.jsonl and its images, as the model sees them, for SFT. Of each scene nine rows read what
    the tool shows, one answers without tools or tells where the ring is, and one calls the tool."""
    rows = []
    for number, (scene, generator) in enumerate(_scenes(count, seed, use_held_out)):
        title = f"{name}-{number:05d}"
        seen = _saved(scene.image.resize((SIDE, SIDE), Image.Resampling.BICUBIC), directory, title)
        shown = [_saved(zoomed(scene.image, place), directory, f"{title}-{place}") for place in range(len(CENTRES))]
        digits = [str(digit) for digit in scene.digits]
        rows += [_row(file, [file], [SHOWN, digit]) for file, digit in zip(shown, digits, strict=True)]
        ring = [WHERE, json.dumps(region(scene.marked))]
        rows.append(_row(seen, [seen], ring if number % 2 else [QUESTION, digits[scene.marked]]))
        place = _looked_at(scene.marked, generator)
        call = json.dumps({"name": "zoom", "arguments": {"box": region(place)}})
        turns = [QUESTION, f"<tool_call>{call}</tool_call>", SHOWN, digits[place]]
        row = _row(f"{title}-call", [seen, shown[place]], turns)
        rows.append({**row, "messages": [{"role": "system", "content": TOOLS}, *row["messages"]]})
    _write(directory / f"{name}.jsonl", rows)


def zoomed(scene: Image.Image, place: int) -> Image.Image:
    """Return what the tool shows of a place."""
    plan = ImagePlan(original_size=scene.size, processed_size=(SIDE, SIDE), grid=(), token_count=0)
    tools = PictureTools([Picture(original=lambda: scene, plan=plan)], "resized_pixels")
    return tools.zoom([float(v) for v in region(place)])


def _looked_at(marked: int, generator: np.random.Generator) -> int:
    draw = generator.random()
    if draw < LOOKS_AT_FIRST:
        return 0
    return marked if draw < LOOKS_AT_FIRST + LOOKS_AT_RING else int(generator.integers(len(CENTRES)))


def _scenes(count: int, seed: int, use_held_out: bool) -> Iterator[tuple[LargeScene, np.random.Generator]]:
    images, labels = load_digit_images()
    chosen = held_out(len(images)) == use_held_out
    generator = np.random.default_rng(seed)
    for _ in range(count):
        yield draw_large_scene(images[chosen], labels[chosen], generator), generator


def _saved(image: Image.Image, directory: Path, name: str) -> str:
    (directory / "images").mkdir(parents=True, exist_ok=True)
    image.save(directory / "images" / f"{name}.png", compress_level=1)
    return f"images/{name}.png"


def _row(name: str, files: list[str], turns: list[str]) -> dict[str, Any]:
    """Make a row whose turns are the user's and the assistant's, one after the other."""
    roles = cycle(("user", "assistant"))
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    return {"id": name, "images": files, "messages": messages}


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
