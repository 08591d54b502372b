"""Sheets of squared paper with two to four handwritten digits in three inks.

The digits are scikit-learn's; training and held-out sheets show disjoint ones. The paper's relief is cut from
scikit-learn's two photographs. Light falls on it from two sides: red increases to the right and green downwards,
because rotary attention alone carries only relative positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageFilter

from tiercel.demo.handwriting import Box, held_out, load_digit_images
from tiercel.errors import EnvironmentProblem

SQUARES = 4  # along a sheet's side
SQUARE = 28  # pixels of a square: one token of Qwen2.5-VL
SIDE = SQUARES * SQUARE
CELL = 4  # pixels; boxes lie on this grid
HEIGHTS = (20, 24, 28)  # pixels of a digit
NARROWEST = 12  # smallest width of a digit, in pixels
DIGIT_COUNTS = (2, 3, 4)
REPEATED_SHARE = 0.4  # of the sheets; these certainly have the same digit at two places

INKS = {"red": (190, 25, 35), "blue": (25, 55, 190), "black": (25, 22, 22)}
INK_SPREAD = 15  # of each colour channel
LIGHT = (170.0, 245.0)  # range of the paper's red and green, from one side to the other
BLUE = 215.0
RELIEF = 10.0  # standard deviation of the paper's grey values
LINE = 18.0  # how much darker the lines of the squares are


@dataclass(frozen=True, kw_only=True, slots=True)
class Digit:
    """A digit on a sheet, and its box (x1, y1, x2, y2) in pixels."""

    value: int
    ink: str
    box: Box

    @property
    def square(self) -> tuple[int, int]:
        """Return the column and the row of the digit's square, counted from 1."""
        return self.box[0] // SQUARE + 1, self.box[1] // SQUARE + 1

    @property
    def place(self) -> str:
        """Return the digit's square as column,row."""
        return f"{self.square[0]},{self.square[1]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    """A picture and its digits from left to right. No column of squares has two digits."""

    image: Image.Image
    digits: tuple[Digit, ...]

    def read_out(self, notes: Sequence[str]) -> str:
        """Return what the sheet shows, from left to right, each digit with a note: 2,4 red 3: no; 3,1 blue 7: here."""
        return "; ".join(
            f"{digit.place} {digit.ink} {digit.value}: {note}" for digit, note in zip(self.digits, notes, strict=True)
        )


class Stationery:
    """Handwriting, inks and paper from which sheets are drawn."""

    def __init__(self, *, is_held_out: bool) -> None:
        images, labels = load_digit_images()
        chosen = held_out(len(images)) == is_held_out
        self.strokes = [cut(image) for image in images[chosen]]
        self.of_digit = [np.flatnonzero(labels[chosen] == digit) for digit in range(10)]
        self.reliefs = load_reliefs()

    def draw(self, generator: np.random.Generator) -> Sheet:
        """Draw a sheet."""
        count = int(generator.choice(DIGIT_COUNTS))
        values = generator.integers(0, 10, count)
        if generator.random() < REPEATED_SHARE:
            first, second = generator.permutation(count)[:2]
            values[first] = values[second]
        columns = sorted(generator.permutation(SQUARES)[:count].tolist())
        canvas = self.paper(generator)
        digits = []
        for column, value in zip(columns, values.tolist(), strict=True):
            strokes = self.strokes[int(generator.choice(self.of_digit[value]))]
            square = (column, int(generator.integers(SQUARES)))
            box = _box_in(square, strokes, generator)
            ink = list(INKS)[int(generator.integers(len(INKS)))]
            write_strokes(canvas, strokes, box, np.array(INKS[ink]) + generator.uniform(-INK_SPREAD, INK_SPREAD, 3))
            digits.append(Digit(value=value, ink=ink, box=box))
        return Sheet(image=Image.fromarray(canvas.clip(0, 255).astype(np.uint8)), digits=tuple(digits))

    def paper(self, generator: np.random.Generator) -> np.ndarray:
        """Return squared paper, float (SIDE, SIDE, 3)."""
        relief = self.reliefs[int(generator.integers(len(self.reliefs)))]
        top, left = (int(generator.integers(length - SIDE)) for length in relief.shape)
        ramp = np.linspace(*LIGHT, SIDE)
        planes = [np.tile(ramp, (SIDE, 1)), np.tile(ramp[:, None], (1, SIDE)), np.full((SIDE, SIDE), BLUE)]
        canvas = np.stack(planes, -1) + relief[top : top + SIDE, left : left + SIDE, None]
        canvas[::SQUARE] -= LINE
        canvas[:, ::SQUARE] -= LINE
        return canvas


def load_reliefs() -> list[np.ndarray]:
    """Load scikit-learn's two photographs as paper: only their fine grey structure, with low contrast. Raises
    EnvironmentProblem without scikit-learn."""
    try:
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise EnvironmentProblem("the demo's paper needs scikit-learn: pip install tiercel[demo]") from error
    reliefs = []
    for photograph in load_sample_images().images:
        grey = Image.fromarray(photograph).convert("L")
        fine, coarse = (np.asarray(grey.filter(ImageFilter.GaussianBlur(radius)), float) for radius in (1, 12))
        relief = fine - coarse
        reliefs.append((relief / relief.std()).clip(-2.5, 2.5) * RELIEF)
    return reliefs


def write_strokes(canvas: np.ndarray, strokes: np.ndarray, box: Box, colour: np.ndarray) -> None:
    """Draw grey values in 0..16 as ink on the paper, enlarged to fill the box."""
    ink = Image.fromarray((strokes / 16 * 255).astype(np.uint8))
    mask = np.asarray(ink.resize((box[2] - box[0], box[3] - box[1]), Image.Resampling.BICUBIC)) / 255.0
    region = canvas[box[1] : box[3], box[0] : box[2]]
    region += mask[..., None] * (colour - region)


def cut(digit: np.ndarray) -> np.ndarray:
    """Cut the empty edges off a digit."""
    rows, columns = np.nonzero(digit > 2)
    return digit[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]


def _box_in(square: tuple[int, int], strokes: np.ndarray, generator: np.random.Generator) -> Box:
    """Choose a box in the square, on the grid, with approximately the digit's own proportions."""
    height = int(generator.choice(HEIGHTS))
    own = height * strokes.shape[1] / strokes.shape[0]
    width = min(SQUARE, max(NARROWEST, round(own / CELL) * CELL))
    left, top = (
        SQUARE * place + CELL * int(generator.integers((SQUARE - length) // CELL + 1))
        for place, length in zip(square, (width, height), strict=True)
    )
    return left, top, left + width, top + height
