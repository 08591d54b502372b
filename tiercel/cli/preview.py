"""`tiercel data preview`: write a page of the first rows of a run as the model will see them. No weights are read."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from tiercel.config import GrpoRecipe, Recipe
from tiercel.config.schema import Purpose
from tiercel.data.encoding import ExampleEncoder, prompt_encoder
from tiercel.data.reading import read_training_rows
from tiercel.errors import DataError
from tiercel.geometry import outline_of, to_pixels
from tiercel.log import printed
from tiercel.message_text import counted
from tiercel.models.families.base import Family
from tiercel.models.families.image_transforms import picture_image
from tiercel.models.families.loading import family_of
from tiercel.rewards.boxes import is_proper
from tiercel.training.grpo.completion_sampling import open_dialogues
from tiercel.types import Box, EncodedImage, EncodedPrompt, Example, Row
from tiercel.web.report.boxes import Outline, box_of
from tiercel.web.report.preview import PreviewPicture, PreviewRow, TokenPiece, render
from tiercel.writing import write_text


def run(recipe: Recipe, arguments: Namespace) -> None:
    """Write a page of the first rows, as many as the command line says. Raises TiercelError if the recipe's rows cannot
    be read or the page cannot be written."""
    family = family_of(recipe)
    table = read_training_rows(recipe.data, recipe.purpose)
    order = table.order(recipe.train.seed, recipe.data)
    indices = range(min(arguments.rows, len(table.rows)))
    with printed(), open_dialogues(recipe, family) as dialogues:
        if isinstance(recipe, GrpoRecipe):
            see = partial(
                _prompt, prompt_encoder(family, recipe.data), list if dialogues is None else dialogues.prompts_of
            )
        else:
            encode = ExampleEncoder(recipe=recipe, family=family, rows=table.rows, order=order)
            see = partial(_answers, encode, recipe.purpose)
        shown = [_preview_row(family, see, table.rows[order.row(index)], index) for index in indices]
    read = f"{counted(table.total, 'row')} in {table.format} format"
    notes = [
        f"{table.file}: {read}, {len(table.rejected):,} rejected on reading",
        f"the first {len(shown):,} in the order of the run, as {family.name} at {family.checkpoint.path} sees them",
    ]
    write_text(arguments.output, render(shown, f"{arguments.recipe.name}: rows", notes))
    print(f"{arguments.output}: {counted(len(shown), 'row')}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A sequence of tokens that the model gets, with a mask of the tokens that are learnt."""

    prompt: EncodedPrompt
    ids_T: Tensor
    is_learnt_T: Tensor


def _prompt(
    encode: Callable[[Row, int], EncodedPrompt],
    begun: Callable[[Sequence[EncodedPrompt]], list[EncodedPrompt]],
    row: Row,
    index: int,
) -> list[Seen]:
    (prompt,) = begun([encode(row, index)])
    ids_P = prompt.token_ids_P
    return [Seen(prompt=prompt, ids_T=ids_P, is_learnt_T=torch.zeros(len(ids_P), dtype=torch.bool))]


def _answers(encode: Callable[[Row, int], Example], purpose: Purpose, row: Row, index: int) -> list[Seen]:
    """Encode both answers of a pair, or the one answer of any other row."""
    seen = []
    for each in encode(row, index).conversations[: 2 if purpose == "pairs" else 1]:
        before_P = torch.zeros(len(each.prompt.token_ids_P), dtype=torch.bool)
        ids_T = torch.cat([each.prompt.token_ids_P, each.token_ids_L])
        seen.append(Seen(prompt=each.prompt, ids_T=ids_T, is_learnt_T=torch.cat([before_P, each.is_scored_L])))
    return seen


def _preview_row(family: Family, see: Callable[[Row, int], list[Seen]], row: Row, index: int) -> PreviewRow:
    place = f"{row.file}:{row.line}"
    try:
        seen = see(row, index)
    except DataError as error:
        return PreviewRow(index=index, id=row.id, place=place, problem=str(error))
    text: list[TokenPiece] = []
    for number, each in enumerate(seen):
        text += [TokenPiece(kind="given", text="\n\n[the rejected answer]\n")] if number else []
        text += pieces(family, each.ids_T, each.is_learnt_T, each.prompt.images)
    answer = row.answer if row.label is None else row.label
    return PreviewRow(
        index=index,
        id=row.id,
        place=place,
        pieces=tuple(text),
        pictures=_pictures(row, seen[0].prompt),
        token_count=sum(len(each.ids_T) for each in seen),
        answer="none" if answer is None else str(answer),
    )


def pieces(
    family: Family, ids_T: Tensor, is_learnt_T: Tensor, images: Sequence[EncodedImage]
) -> tuple[TokenPiece, ...]:
    """Split tokens into pieces of text. The tokens of an image make one piece."""
    is_vision = family.is_placeholder(ids_T).tolist()
    kinds = [
        "image" if vision else "learnt" if learnt else "given"
        for vision, learnt in zip(is_vision, is_learnt_T.tolist(), strict=True)
    ]
    left = [(number, count) for number, image in enumerate(images) for count in _runs(family, image)]
    found: list[TokenPiece] = []
    start = 0
    for kind, run in groupby(kinds):
        stop = start + len(list(run))
        if kind != "image":
            text = family.tokenizer.decode(ids_T[start:stop].tolist(), skip_special_tokens=False)
            found.append(TokenPiece(kind="learnt" if kind == "learnt" else "given", text=text))
        while kind == "image" and start < stop:  # images may follow each other directly
            number, count = left.pop(0)
            what = "image" if images[number].plan.fps is None else "video"
            found.append(TokenPiece(kind="image", text=f"[{what}: {count} tokens]"))
            start += count
        start = stop
    return tuple(found)


def _runs(family: Family, image: EncodedImage) -> list[int]:
    """Return the lengths of the runs of consecutive placeholders: one for an image, or one for each group of a video
    that has text between its groups."""
    is_vision = family.is_placeholder(torch.tensor(family.image_token_ids(image.plan))).tolist()
    return [len(list(run)) for vision, run in groupby(is_vision) if vision]


def _pictures(row: Row, prompt: EncodedPrompt) -> tuple[PreviewPicture, ...]:
    shown = []
    for number, image in enumerate(prompt.images):
        size = image.plan.original_size
        boxes = [
            (outline_of(box), "neutral", f"box {place}")
            for place, box in enumerate(row.boxes)
            if row.box_images[place] == number
        ]
        if number == row.answer_visual:
            found = [to_pixels(box, row.answer_space, size) for box in _answer_boxes(row.answer)]
            boxes += [(box, "truth", "answer") for box in found]
        shown.append(
            PreviewPicture(
                image=picture_image(image.views[0]),
                name=prompt.image_paths[number] or "(embedded image)",
                original_size=size,
                processed_size=image.plan.processed_size,
                token_count=image.plan.token_count,
                outlines=tuple(Outline(box=box, style=style, label=label) for box, style, label in boxes),
            )
        )
    return tuple(shown)


def _answer_boxes(answer: object) -> list[Box]:
    """Return the boxes of an answer that is a box or a list of boxes."""
    candidates = answer if isinstance(answer, list) and answer and isinstance(answer[0], list) else [answer]
    return [box for each in candidates if (box := box_of(each)) is not None and is_proper(box)]
