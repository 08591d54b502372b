"""Scenes of real handwriting: one or more of scikit-learn's digits on paper, a question, and the box that answers it.

The digits' 8 x 8 grey values are enlarged and pasted on paper whose red increases with x and whose green increases with
y, because rotary attention alone carries only relative positions. Training and held-out scenes use disjoint digits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from tiercel.demo.handwriting import Box, dialogue, held_out, load_digit_images, save_picture, write_rows
from tiercel.demo.sheets import cut, write_strokes

DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SIDE = 112  # pixels of a scene: 4 x 4 tokens for Qwen2.5-VL
CELL = 4  # pixels; boxes lie on this grid
SMALLEST, LARGEST = 28, 52  # pixels of a digit's box


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A picture, the digit that is asked for, and its box (x1, y1, x2, y2) in pixels."""

    image: Image.Image
    digit: int
    box: Box


@dataclass(frozen=True, kw_only=True, slots=True)
class SceneSet:
    """The scenes of one file, and what they show."""

    name: str
    count: int
    seed: int
    digit_counts: tuple[int, ...] = (1,)  # numbers of digits in a scene, each for an equal share of the file
    is_held_out: bool = False
    jitter: int = 0  # largest shift of a written corner, in pixels


def draw_scene(images: np.ndarray, labels: np.ndarray, digit_count: int, generator: np.random.Generator) -> Scene:
    """Draw a scene of `digit_count` different digits that do not overlap. One of them is asked for."""
    canvas = paper(SIDE)
    taken: list[Box] = []
    shown: list[int] = []
    while len(taken) < digit_count:
        pick = int(generator.integers(len(images)))
        box = _random_box(generator)
        if int(labels[pick]) in shown or any(_overlap(box, other) for other in taken):
            continue
        paste(canvas, cut(images[pick]), box, generator)
        taken.append(box)
        shown.append(int(labels[pick]))
    target = int(generator.integers(digit_count))
    picture = Image.fromarray(canvas.clip(0, 255).astype(np.uint8))
    return Scene(image=picture, digit=shown[target], box=taken[target])


def write_scenes(directory: Path, scenes: SceneSet) -> Path:
    """Write the rows of the scenes to `directory`/NAME.jsonl, and their images.

    The row's `answer` is always the true box; only the assistant turn, which SFT learns from, is jittered.
    """
    images, labels = load_digit_images()
    chosen = held_out(len(images)) == scenes.is_held_out
    generator = np.random.default_rng(scenes.seed)
    rows = []
    for number in range(scenes.count):
        digit_count = scenes.digit_counts[number * len(scenes.digit_counts) // scenes.count]
        scene = draw_scene(images[chosen], labels[chosen], digit_count, generator)
        file = save_picture(scene.image, directory, f"{scenes.name}-{number:05d}")
        answer = written(jittered(scene.box, scenes.jitter, generator))
        row = dialogue(f"{scenes.name}-{number}", [file], [f"<image>Where is the {DIGIT_NAMES[scene.digit]}?", answer])
        rows.append({**row, "answer": list(scene.box)})
    return write_rows(directory / f"{scenes.name}.jsonl", rows)


def written(box: Sequence[int]) -> str:
    """Format a box as the model does."""
    return f"[{', '.join(map(str, box))}]"


def paper(side: int) -> np.ndarray:
    """Return the paper, float (side, side, 3): red increases to the right, green downwards, and blue is constant."""
    ramp = np.linspace(60, 250, side)
    return np.stack([np.tile(ramp, (side, 1)), np.tile(ramp[:, None], (1, side)), np.full((side, side), 150.0)], -1)


def paste(canvas: np.ndarray, digit: np.ndarray, box: Box, generator: np.random.Generator) -> None:
    """Draw grey values in 0..16 as dark ink on the paper, enlarged to fill the box."""
    write_strokes(canvas, digit, box, generator.uniform(0, 40, 3))


def _random_box(generator: np.random.Generator) -> Box:
    width, height = (int(v) * CELL for v in generator.integers(SMALLEST // CELL, LARGEST // CELL + 1, 2))
    left = int(generator.integers((SIDE - width) // CELL + 1)) * CELL
    top = int(generator.integers((SIDE - height) // CELL + 1)) * CELL
    return left, top, left + width, top + height


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def jittered(box: Box, jitter: int, generator: np.random.Generator) -> Box:
    """Move the corners on the grid, so that the box keeps a positive area."""
    if jitter == 0:
        return box
    steps = jitter // CELL
    while True:
        moves = generator.integers(-steps, steps + 1, 4)
        x1, y1, x2, y2 = (min(SIDE, max(0, v + int(d) * CELL)) for v, d in zip(box, moves, strict=True))
        if x2 > x1 and y2 > y1:
            return x1, y1, x2, y2
