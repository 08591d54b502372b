"""What the demo's start learns by SFT before whole sheets: to name the digit of a square, and to note whether it is the
one that is asked for."""

from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import numpy as np
from PIL import Image

from tiercel.demo.handwriting import dialogue, save_picture, write_rows
from tiercel.demo.questions import TEXTS
from tiercel.demo.sheet_rows import RowSet
from tiercel.demo.sheets import INKS, SQUARE, Digit, Stationery

ASKED_FOR = 0.5  # of the squares


def write_squares(directory: Path, rows: RowSet) -> None:
    """Write rows that show one square of a sheet, with their images: `directory`/NAME.jsonl names its ink and digit,
    and asked-NAME.jsonl notes what it means for a question."""
    stationery, generator = Stationery(is_held_out=rows.is_held_out), np.random.default_rng(rows.seed)
    dice = np.random.default_rng([rows.seed, 1])
    named, noted = [], []
    for number, (picture, digit) in enumerate(islice(_squares(stationery, generator), rows.count)):
        name = f"{rows.name}-{number}"
        file = save_picture(picture, directory, f"{rows.name}-{number:05d}")
        named.append(dialogue(name, [file], ["<image>", f"a {digit.ink} {digit.value}"]))
        noted.append(dialogue(name, [file], note(digit, number, dice)))
    write_rows(directory / f"{rows.name}.jsonl", named)
    write_rows(directory / f"asked-{rows.name}.jsonl", noted)


def note(digit: Digit, number: int, dice: np.random.Generator) -> list[str]:
    """Return a question about the digit of a square or about another one, with kinds of questions in turn, and the
    thought that answers it."""
    is_asked_for = dice.random() < ASKED_FOR
    other_inks = [ink for ink in INKS if ink != digit.ink]
    value = digit.value if is_asked_for else (digit.value + int(dice.integers(1, 10))) % 10
    ink = digit.ink if is_asked_for else other_inks[int(dice.integers(len(other_inks)))]
    kind, asked, said = (
        ("where", value, "here"), ("count", value, "1"), ("sum", ink, str(digit.value))
    )[number % 3]  # fmt: skip
    thought = f"1,1 {digit.ink} {digit.value}: {said if is_asked_for else 'no'}"
    return [f"<image>{TEXTS[kind].format(asked)}", f"<think>{thought}</think>"]


def _squares(stationery: Stationery, generator: np.random.Generator) -> Iterator[tuple[Image.Image, Digit]]:
    for sheet in (stationery.draw(generator) for _ in count()):
        for digit in sheet.digits:
            left, top = (SQUARE * (place - 1) for place in digit.square)
            yield sheet.image.crop((left, top, left + SQUARE, top + SQUARE)), digit
