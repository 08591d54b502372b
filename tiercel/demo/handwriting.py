"""scikit-learn's handwritten digits, and rows that show pictures of them. Training and held-out pictures use disjoint
digits."""

import json
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tiercel.errors import EnvironmentProblem

HELD_OUT_SHARE = 5  # every fifth of scikit-learn's samples is held out

Box = tuple[int, int, int, int]


def load_digit_images() -> tuple[np.ndarray, np.ndarray]:
    """Load 1,797 grey images (8, 8) in 0..16 and their labels. Raises EnvironmentProblem without scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise EnvironmentProblem("the demo's handwriting needs scikit-learn: pip install tiercel[demo]") from error
    digits = load_digits()
    return digits.images, digits.target


def held_out(count: int) -> np.ndarray:
    """Return a bool array (count,) that marks the samples of scikit-learn that no training scene shows."""
    return np.arange(count) % HELD_OUT_SHARE == 0


def save_picture(image: Image.Image, directory: Path, name: str) -> str:
    """Write `directory`/images/`name`.png and return its path relative to `directory`."""
    (directory / "images").mkdir(parents=True, exist_ok=True)
    image.save(directory / "images" / f"{name}.png", compress_level=1)
    return f"images/{name}.png"


def dialogue(name: str, files: list[str], turns: list[str]) -> dict[str, Any]:
    """Return a row whose turns are the user's and the assistant's in alternation."""
    roles = cycle(("user", "assistant"))
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    return {"id": name, "images": files, "messages": messages}


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write a .jsonl file and return its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
