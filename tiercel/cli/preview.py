"""`tiercel data preview`: write a page of the first rows of a run as the model will see them. No weights are read."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from tiercel.config import GrpoRecipe, Recipe
from tiercel.data.encoding import conversation_encoder, prompt_encoder
from tiercel.data.reading import read_training_rows
from tiercel.errors import DataError
from tiercel.models.family import Family
from tiercel.models.images import picture_image
from tiercel.models.loading import load_family
from tiercel.report.pictures import Outline
from tiercel.report.preview import Piece, PreviewPicture, PreviewRow, render
from tiercel.rewards.boxes import is_proper
from tiercel.training.turns import open_dialogues
from tiercel.types import Box, EncodedImage, EncodedPrompt, Row
from tiercel.writing import write_text


def run(recipe: Recipe, arguments: Namespace) -> None:
    """Write the page as the command line says."""
    preview(recipe, arguments.recipe.name, arguments.rows, arguments.output)


def preview(recipe: Recipe, name: str, count: int, output: Path) -> None:
    """Write a page of the first `count` rows. Raises TiercelError where the recipe's rows cannot be read, or the page
    cannot be written."""
    family = load_family(recipe.model, recipe.data.template, recipe.data.coordinates)
    table = read_training_rows(recipe.data, "grpo" if isinstance(recipe, GrpoRecipe) else "sft")
    order = table.order(recipe.train.seed, recipe.data.shuffle)
    indices = range(min(count, len(table.rows)))
    with open_dialogues(recipe, family, print) as dialogues:
        begun = list if dialogues is None else dialogues.prompts_of
        shown = [_preview_row(family, recipe, table.rows[order.row(index)], index, begun) for index in indices]
    notes = [
        f"{table.file}: {table.total:,} rows in {table.format} format, {len(table.rejected):,} rejected on reading",
        f"the first {len(shown):,} in the order of the run, as {family.name} at {family.checkpoint.path} sees them",
    ]
    write_text(output, render(shown, f"{name}: rows", notes))
    print(f"{output}: {len(shown)} rows")


def _preview_row(
    family: Family,
    recipe: Recipe,
    row: Row,
    index: int,
    begun: Callable[[Sequence[EncodedPrompt]], list[EncodedPrompt]],
) -> PreviewRow:
    place = f"{row.file}:{row.line}"
    try:
        if isinstance(recipe, GrpoRecipe):
            (prompt,) = begun([prompt_encoder(family, recipe.data)(row, index)])
            ids, is_learnt = prompt.token_ids_P, torch.zeros(len(prompt.token_ids_P), dtype=torch.bool)
        else:
            conversation = conversation_encoder(family, recipe.data)(row, index)
            prompt = conversation.prompt
            ids = torch.cat([prompt.token_ids_P, conversation.token_ids_L])
            is_learnt = torch.cat([torch.zeros(len(prompt.token_ids_P), dtype=torch.bool), conversation.is_scored_L])
    except DataError as error:
        return PreviewRow(
            index=index, id=row.id, place=place, pieces=(), pictures=(), token_count=0, answer="", problem=str(error)
        )
    return PreviewRow(
        index=index,
        id=row.id,
        place=place,
        pieces=pieces(family, ids, is_learnt, prompt.images),
        pictures=_pictures(row, prompt),
        token_count=len(ids),
        answer="none" if row.answer is None else str(row.answer),
    )


def pieces(family: Family, ids_T: Tensor, is_learnt_T: Tensor, images: Sequence[EncodedImage]) -> tuple[Piece, ...]:
    """Split tokens into pieces of text; the tokens of an image are one piece."""
    is_vision = family.is_placeholder(ids_T).tolist()
    kinds = [
        "image" if vision else "learnt" if learnt else "given"
        for vision, learnt in zip(is_vision, is_learnt_T.tolist(), strict=True)
    ]
    left = [(number, count) for number, image in enumerate(images) for count in _runs(family, image)]
    found: list[Piece] = []
    start = 0
    for kind, run in groupby(kinds):
        stop = start + len(list(run))
        if kind != "image":
            text = family.tokenizer.decode(ids_T[start:stop].tolist(), skip_special_tokens=False)
            found.append(Piece(kind="learnt" if kind == "learnt" else "given", text=text))
        while kind == "image" and start < stop:  # images may stand side by side
            number, count = left.pop(0)
            what = "image" if images[number].plan.fps is None else "video"
            found.append(Piece(kind="image", text=f"[{what}: {count} tokens]"))
            start += count
        start = stop
    return tuple(found)


def _runs(family: Family, image: EncodedImage) -> list[int]:
    """Count placeholders that follow each other: all of an image, or each group of a video's that has words between."""
    is_vision = family.is_placeholder(torch.tensor(family.image_token_ids(image.plan))).tolist()
    return [len(list(run)) for vision, run in groupby(is_vision) if vision]


def _pictures(row: Row, prompt: EncodedPrompt) -> tuple[PreviewPicture, ...]:
    shown = []
    for number, image in enumerate(prompt.images):
        boxes = [
            (box, "neutral", f"box {place}") for place, box in enumerate(row.boxes) if row.box_images[place] == number
        ]
        if number == 0:
            boxes += [(box, "truth", "answer") for box in _answer_boxes(row.answer)]
        shown.append(
            PreviewPicture(
                image=picture_image(image.views[0]),
                name=prompt.image_paths[number] or "(embedded image)",
                original_size=image.plan.original_size,
                processed_size=image.plan.processed_size,
                token_count=image.plan.token_count,
                outlines=tuple(Outline(box=box, style=style, label=label) for box, style, label in boxes),
            )
        )
    return tuple(shown)


def _answer_boxes(answer: object) -> list[Box]:
    """Read the boxes of an answer that is a box or a list of boxes."""
    candidates = answer if isinstance(answer, list) and answer and isinstance(answer[0], list) else [answer]
    boxes = []
    for candidate in candidates:
        if (
            isinstance(candidate, list)
            and len(candidate) == 4
            and all(type(side) in (int, float) for side in candidate)
        ):
            box = (float(candidate[0]), float(candidate[1]), float(candidate[2]), float(candidate[3]))
            boxes += [box] if is_proper(box) else []
    return boxes
