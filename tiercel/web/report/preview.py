"""A page of rows as the model will see them: the tokens as text, and the resized pictures with the row's boxes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from PIL import Image

from tiercel.reward_types import Size
from tiercel.web.report.boxes import Outline
from tiercel.web.report.page import offline


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenPiece:
    """Consecutive tokens of one kind, decoded."""

    kind: Literal["given", "learnt", "image"]
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviewPicture:
    """A picture of a row, as resized."""

    image: Image.Image
    name: str
    original_size: Size
    processed_size: Size
    token_count: int
    outlines: tuple[Outline, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviewRow:
    """A row of the run's order."""

    index: int
    id: str
    place: str  # file:line
    pieces: tuple[TokenPiece, ...] = ()
    pictures: tuple[PreviewPicture, ...] = ()
    token_count: int = 0
    answer: str = ""
    problem: str = ""  # why the row is rejected; then it has neither pieces nor pictures


def render(rows: Sequence[PreviewRow], title: str, notes: Sequence[str]) -> str:
    """Make the page. `notes`: lines on what was read."""
    return offline("preview.html", title=title, rows=rows, notes=notes, origin="the recipe's rows")
