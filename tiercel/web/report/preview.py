"""A page of rows as the model will see them: the tokens as text, and the resized pictures with the row's boxes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from PIL import Image

from tiercel.samples import Size
from tiercel.web.report.markup import Html, element, fragment
from tiercel.web.report.numbers import TIMES
from tiercel.web.report.page import document
from tiercel.web.report.pictures import Outline, embedded, figure


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
    pieces: tuple[TokenPiece, ...]
    pictures: tuple[PreviewPicture, ...]
    token_count: int
    answer: str
    problem: str = ""  # why the row is rejected; then it has neither pieces nor pictures


def render(rows: Sequence[PreviewRow], title: str, notes: Sequence[str]) -> str:
    """Make the page. `notes`: lines on what was read."""
    header = element("header", element("h1", title), [element("p", note, class_="aside") for note in notes], _legend())
    return document(title, "the recipe's rows", fragment(header, [_row(row) for row in rows]))


def _legend() -> Html:
    return element(
        "p",
        element("mark", "learnt", class_="learnt"),
        " tokens that SFT learns; ",
        element("mark", "[image]", class_="image-tokens"),
        " tokens that a picture takes; boxes of the row are drawn over its picture",
        class_="aside",
    )


def _row(row: PreviewRow) -> Html:
    head = element("h2", f"{row.index}: {row.id}")
    if row.problem:
        return element("section", head, element("p", f"{row.place}: rejected: {row.problem}", class_="notice"))
    return element(
        "section",
        head,
        element("p", f"{row.place}, {row.token_count:,} tokens; answer: {row.answer}", class_="aside"),
        element("div", [_picture(picture) for picture in row.pictures], class_="pictures") if row.pictures else None,
        element("pre", [_piece(piece) for piece in row.pieces], class_="tokens"),
    )


def _piece(piece: TokenPiece) -> Html:
    classes = {"learnt": "learnt", "image": "image-tokens"}
    return element("mark", piece.text, class_=classes[piece.kind]) if piece.kind in classes else fragment(piece.text)


def _picture(picture: PreviewPicture) -> Html:
    (width, height), (new_width, new_height) = picture.original_size, picture.processed_size
    caption = f"{picture.name}, {width} {TIMES} {height}"
    if picture.original_size != picture.processed_size:
        caption += f", resized to {new_width} {TIMES} {new_height}"
    caption += f", {picture.token_count:,} tokens"
    return figure(embedded(picture.image), picture.name, caption, picture.original_size, picture.outlines)
